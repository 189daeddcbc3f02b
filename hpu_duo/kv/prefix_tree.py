"""A radix tree of token blocks: common prefixes of texts, their keys and values, and the pinned ones."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hpu_duo.request import PrefixHold

NO_BLOCK = -1
_TOKEN_BYTES = np.dtype(np.int32).itemsize


def digest_of(parent: bytes, key: bytes) -> bytes:
    """Return the digest of a prefix that is one block longer than its parent."""
    return hashlib.sha256(parent + key).digest()


def root_digest(namespace: Hashable) -> bytes:
    """Return the digest of the empty prefix of a namespace."""
    return digest_of(b"", repr(namespace).encode())


def digests_of(root: bytes, tokens: npt.NDArray[np.int32], block_size: int) -> list[bytes]:
    """Return the digests of the prefixes of a text by whole blocks, beginning with the empty one.

    Args:
        root: see ``root_digest``.
    """
    found = [root]
    for end in range(block_size, len(tokens) + 1, block_size):
        found.append(digest_of(found[-1], tokens[end - block_size : end].tobytes()))
    return found


class PrefixNode:
    """One block of tokens after those of its parents, that is, a prefix of ``depth`` blocks.

    Blocks are full, except for the last one of a text that has ended, which may be *partial*: a node with
    fewer tokens and without children.

    Attributes:
        parent: the prefix that is one block shorter; None for the empty one.
        key: tokens of the block, as bytes.
        block: id of the block with their keys and values, ``NO_BLOCK`` where no head needs one.
        snapshot: row with the rings at the end of the prefix, None if there is none.
        depth: blocks of the prefix.
        digest: SHA-256 of the prefix, chained over its blocks and its namespace.
        children: prefixes that are one block longer, by the key of that block.
        partial_children: those of them whose last block is partial.
        last_used: time of the last use.
        is_shared: whether another text was found to diverge after it.
        is_costly: whether a text with it was long enough for ``WritePolicy.WRITE_THROUGH_COST``.
    """

    __slots__ = (
        "block",
        "children",
        "depth",
        "digest",
        "is_costly",
        "is_shared",
        "key",
        "last_used",
        "parent",
        "partial_children",
        "snapshot",
    )

    def __init__(self, parent: PrefixNode | None, key: bytes, block: int) -> None:
        self.parent, self.key, self.block = parent, key, block
        self.snapshot: int | None = None
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[bytes, PrefixNode] = {}
        self.partial_children: tuple[PrefixNode, ...] = ()
        self.digest: bytes = key if parent is None else digest_of(parent.digest, key)
        self.last_used = 0
        self.is_shared = self.is_costly = False

    @property
    def num_own_tokens(self) -> int:
        """Tokens of the block."""
        return len(self.key) // _TOKEN_BYTES

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix."""
        if self.parent is None:
            return 0
        before = self.parent.num_own_tokens if self.parent.parent is not None else 0
        return (self.depth - 1) * before + self.num_own_tokens

    @property
    def path(self) -> Iterator[PrefixNode]:
        """The node and its ancestors, without the root, the deepest first."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class PrefixRoot(PrefixNode):
    """The empty prefix of a namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Hashable) -> None:
        super().__init__(None, b"", NO_BLOCK)
        self.namespace = namespace
        self.digest = root_digest(namespace)


class PrefixTree:
    """Prefixes of whole blocks, and of partial ones behind them, in namespaces that share nothing.

    Compares tokens, not hashes, so two texts are never confused.

    Args:
        block_size: tokens of a block; an attribute too.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        # Only namespaces with a block: others would never be removed.
        self._roots: dict[Hashable, PrefixRoot] = {}
        self._num_nodes = 0
        self._time = 0
        # Leaves by last use; an entry is stale if its node is not a leaf or was used since.
        self._leaves: list[tuple[int, int, PrefixNode]] = []
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_nodes

    def __iter__(self) -> Iterator[PrefixNode]:
        stack = [node for root in self._roots.values() for node in root.children.values()]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node

    @property
    def time(self) -> int:
        """Number of uses so far."""
        return self._time

    @property
    def num_namespaces(self) -> int:
        """Number of namespaces with a block."""
        return len(self._roots)

    def root(self, namespace: Hashable) -> PrefixNode:
        """Return the empty prefix of a namespace, which is added to the tree with its first block."""
        root = self._roots.get(namespace)
        return PrefixRoot(namespace) if root is None else root

    def key(self, tokens: npt.NDArray[np.int32], ordinal: int) -> bytes:
        """Return the key of a full block of a text."""
        return tokens[ordinal * self.block_size : (ordinal + 1) * self.block_size].tobytes()

    def match(self, namespace: Hashable, tokens: npt.NDArray[np.int32]) -> list[PrefixNode]:
        """Return the longest cached prefix of a text, as its nodes from the shallowest on."""
        node: PrefixNode | None = self._roots.get(namespace)
        path: list[PrefixNode] = []
        if node is None:
            return path
        for ordinal in range(len(tokens) // self.block_size):
            node = node.children.get(self.key(tokens, ordinal))
            if node is None:
                break
            path.append(node)
        return path

    def add(self, parent: PrefixNode, key: bytes, block: int) -> PrefixNode:
        """Add a prefix that is one block longer than its parent; with a shorter key that block is partial.

        Raises:
            ValueError: it exists, or the namespace of the parent has another root in the tree.
        """
        if key in parent.children:
            raise ValueError(f"the prefix of {parent.depth + 1} blocks is in the tree already")
        if isinstance(parent, PrefixRoot) and self._roots.setdefault(parent.namespace, parent) is not parent:
            raise ValueError(f"namespace {parent.namespace!r} has another empty prefix in the tree")
        node = parent.children[key] = PrefixNode(parent, key, block)
        if self.is_partial(node):
            parent.partial_children += (node,)
        self._num_nodes += 1
        self.use(node)
        return node

    def is_partial(self, node: PrefixNode) -> bool:
        """Whether the last block of a prefix is partial."""
        return node.num_own_tokens < self.block_size

    def match_partial(self, node: PrefixNode, tokens: npt.NDArray[np.int32]) -> PrefixNode | None:
        """Return the longest known prefix of a text that ends in a partial block and has a snapshot.

        Args:
            node: the prefix of full blocks before it.
        """
        start, found = node.depth * self.block_size, None
        for each in node.partial_children:
            is_longer = found is None or each.num_own_tokens > found.num_own_tokens
            # One that is loaded from a tier has its snapshot later than its block, or never.
            if each.snapshot is None or not is_longer:
                continue
            if tokens[start : start + each.num_own_tokens].tobytes() == each.key:
                found = each
        return found

    def use(self, node: PrefixNode) -> None:
        """Mark a prefix, and all shorter ones with it, as used now."""
        self._time += 1
        for each in node.path:
            each.last_used = self._time
        self._enlist(node)

    def remove(self, node: PrefixNode) -> None:
        """Remove a prefix without children.

        Raises:
            ValueError: there are longer ones.
        """
        if node.children or node.parent is None:
            raise ValueError(f"a prefix of {node.depth} blocks that longer ones begin with cannot be removed")
        parent = node.parent
        del parent.children[node.key]
        if self.is_partial(node):
            parent.partial_children = tuple(each for each in parent.partial_children if each is not node)
        self._num_nodes -= 1
        if parent.parent is not None:
            self._enlist(parent)
        elif isinstance(parent, PrefixRoot) and not parent.children:
            del self._roots[parent.namespace]

    def least_used(self, may_go: Callable[[PrefixNode], bool]) -> PrefixNode | None:
        """Return the least recently used leaf that may be evicted; None if there is none."""
        passed, found = [], None
        while self._leaves and found is None:
            entry = heappop(self._leaves)
            last_used, _, node = entry
            is_leaf = not node.children and self.holds(node)
            if not is_leaf or node.last_used != last_used:
                continue
            passed.append(entry)
            if may_go(node):
                found = node
        for entry in passed:
            heappush(self._leaves, entry)
        return found

    def holds(self, node: PrefixNode) -> bool:
        """Whether a prefix of a block or more is in the tree."""
        return node.parent is not None and node.parent.children.get(node.key) is node

    def _enlist(self, node: PrefixNode) -> None:
        if not node.children and node.parent is not None:
            self._num_entries += 1
            heappush(self._leaves, (node.last_used, self._num_entries, node))
            if len(self._leaves) > 2 * self._num_nodes + 64:
                self._leaves = sorted(_current(self._leaves, self.holds))


def _current(
    entries: Iterable[tuple[int, int, PrefixNode]], holds: Callable[[PrefixNode], bool]
) -> Iterator[tuple[int, int, PrefixNode]]:
    """Yield the latest entry of each leaf, without stale ones."""
    latest = {
        node: (used, number, node)
        for used, number, node in entries
        if not node.children and holds(node) and node.last_used == used
    }
    return iter(latest.values())


class Adoption(NamedTuple):
    """A newly cached prefix, and its units to be written.

    Attributes:
        hold: of the prefix.
        new: nodes that were not cached, the shallowest first.
        first: index in the prefix of the first block to be written.
        blocks: ids of that one and the following ones.
        row: row of the rings; None if they were cached, or no head has any.
    """

    hold: PrefixHold
    new: list[PrefixNode]
    first: int
    blocks: list[int]
    row: int | None


class PrefixHolds:
    """Reference counts of pinned prefixes, which may share blocks.

    Attributes:
        left: holds with a reference to be released before the next step; any thread appends to it at any
            moment.
        idle_s: seconds without use after which a prefix need not stay; None = it stays.
    """

    def __init__(self) -> None:
        self._holds: dict[PrefixHold, None] = {}
        self._held: Counter[PrefixNode] = Counter()
        self._ends: Counter[PrefixNode] = Counter()
        self.left: deque[PrefixHold] = deque()
        self.idle_s: float | None = None

    def __iter__(self) -> Iterator[PrefixHold]:
        return iter(tuple(self._holds))

    @property
    def num_nodes(self) -> int:
        """Number of pinned nodes, hence of pinned blocks, each counted once."""
        return len(self._held)

    @property
    def idle(self) -> list[PrefixHold]:
        """Pinned prefixes without requests, unused for ``idle_s`` seconds; any thread may ask."""
        if self.idle_s is None:
            return []
        return [each for each in self if not each.num_requests and each.idle_for >= self.idle_s]

    @property
    def num_needed(self) -> int:
        """Number of nodes that the others pin; any thread may ask."""
        if not (idle := self.idle):
            return self.num_nodes
        ends = [hold.node for hold in self if hold not in idle]
        return len({node for end in ends if end is not None for node in end.path})

    @property
    def num_ends(self) -> int:
        """Distinct prefixes from which a request must be able to continue."""
        return len(self._ends)

    def ends_at(self, node: PrefixNode) -> bool:
        """Whether a pinned prefix ends at a node."""
        return node in self._ends

    def num_new(self, path: list[PrefixNode], num_blocks: int) -> int:
        """Return how many blocks of a prefix of ``num_blocks`` blocks are not pinned yet.

        Args:
            path: its nodes in the tree.
        """
        return num_blocks - sum(node in self._held for node in path)

    def add(self, hold: PrefixHold, node: PrefixNode) -> None:
        """Pin the prefix that ends at a node, with one reference."""
        assert hold.node is None, "expected a hold without a prefix"
        hold.node = node
        hold.touch()
        self._holds[hold] = None
        self._held.update(node.path)
        self._ends[node] += 1

    def remove(self, hold: PrefixHold) -> PrefixNode:
        """Unpin a prefix; returns its last node."""
        node = hold.node
        assert node is not None, "expected a pinned prefix"
        hold.node = None
        del self._holds[hold]
        _take(self._held, node.path)
        _take(self._ends, (node,))
        return node

    def leave_later(self, hold: PrefixHold) -> None:
        """Append a hold to ``left``, from any thread and at any moment."""
        self.left.append(hold)


def _take(counts: Counter[PrefixNode], nodes: Iterable[PrefixNode]) -> None:
    for node in nodes:
        counts[node] -= 1
        if not counts[node]:
            del counts[node]
