"""Rules written down once more, pair by pair, and random ones."""

from __future__ import annotations

from hypothesis import strategies as st

from bias_builders import (
    Behind,
    BlockTable,
    Dilated,
    Fixed,
    Rule,
    RuleIntersection,
    RuleUnion,
    Strided,
    Window,
)


def plain(rule: Rule, query: int, key: int) -> bool:
    """Whether a token sees another one, by listing what it sees."""
    if key > query:
        return False
    match rule:
        case Window(sink, recent):
            return key in {*range(sink), *range(max(0, query - recent + 1), query + 1)}
        case Dilated(width, dilation):
            return key in {query - step * dilation for step in range(width)}
        case Strided(stride):
            return key in {*range(query - stride + 1, query + 1), *range(query, -1, -stride)}
        case Fixed(stride, summary):
            begin = next(start for start in range(query, -1, -1) if start % stride == 0)
            ends = {
                run + stride - back for run in range(0, query + 1, stride) for back in range(1, summary + 1)
            }
            return key in {*range(begin, query + 1), *ends}
        case Behind(hidden):
            return key in {*range(hidden, query), query}
        case RuleUnion(rules):
            return any(plain(each, query, key) for each in rules)
        case RuleIntersection(rules):
            return all(plain(each, query, key) for each in rules)
        case BlockTable(block, rows):
            own, other = divmod(query, block)[0], divmod(key, block)[0]
            return own == other or (own < len(rows) and other in rows[own])
    raise AssertionError(rule)


def rules() -> st.SearchStrategy[Rule]:
    """Rules in closed form, and unions and intersections of them."""
    size = st.integers(1, 12)
    leaves: st.SearchStrategy[Rule] = st.one_of(
        st.builds(Window, st.integers(0, 5), size),
        st.builds(Dilated, size, st.integers(1, 5)),
        st.builds(Strided, size),
        st.builds(Behind, size),
        size.flatmap(lambda stride: st.builds(Fixed, st.just(stride), st.integers(1, stride))),
    )

    def nested(inner: st.SearchStrategy[Rule]) -> st.SearchStrategy[Rule]:
        several = st.lists(inner, min_size=2, max_size=3).map(tuple)
        return st.one_of(st.builds(RuleUnion, several), st.builds(RuleIntersection, several))

    return st.recursive(leaves, nested, max_leaves=4)


def tables() -> st.SearchStrategy[BlockTable]:
    """Tables of blocks."""

    def row(number: int) -> st.SearchStrategy[tuple[int, ...]]:
        return st.sets(st.integers(0, number)).map(lambda keys: tuple(sorted(keys)))

    rows = st.integers(0, 6).flatmap(lambda size: st.tuples(*(row(number) for number in range(size))))
    return st.builds(BlockTable, st.integers(1, 9), rows)
