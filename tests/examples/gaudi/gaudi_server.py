"""The scripts of examples/gaudi, run as a user runs them, with stand-ins for what only a Gaudi server has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
GAUDI = ROOT / "examples" / "gaudi"
STANDIN = Path(__file__).parent / "standin"
VENDOR = ROOT / "tests" / "sim" / "standin"
SIMULATED = str(GAUDI / "env" / "simulated.env")
GAUDI3 = "HL-325L 0000:b3:00.0 1.24.1-ca59b5a 672 131072"


class Server:
    """A server with Gaudi cards, as far as scripts can see: hl-smi, /proc, /sys and the vendor's packages.

    Attributes:
        state: STATE_DIR.
        environment: variables of every script.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.state = directory / "state"
        self._bin = directory / "bin"
        self._bin.mkdir()
        kept = ("HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS", "COVERAGE_PROCESS_START")
        self.environment = {name: os.environ[name] for name in kept if name in os.environ}
        # hpu-duo and python3 are those of this environment.
        own = Path(sys.executable).parent
        self.environment |= {
            "PATH": f"{self._bin}:{own}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "STATE_DIR": str(self.state),
            "COLUMNS": "200",
        }

    def has_command(self, name: str, text: str) -> None:
        """Put a command in front of all others."""
        path = self._bin / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)

    def has_cards(self, *cards: str, nodes: tuple[int, ...] = (0,)) -> None:
        """Give it hl-smi, these cards and the vendor's packages."""
        (self._bin / "hl-smi").symlink_to(STANDIN / "hl-smi")
        file = self._directory / "cards"
        file.write_text("".join(f"{card}\n" for card in cards), encoding="utf-8")
        root = self._directory / "root"
        for name, text in {
            "proc/meminfo": "HugePages_Total:    1024\nHugePages_Free:     1024\nHugepagesize:    2048 kB\n",
            "sys/module/habanalabs/version": "1.24.1-ca59b5a\n",
        }.items():
            _write(root / name, text)
        for node in nodes:
            _write(
                root / f"sys/devices/system/node/node{node}/cpulist", "0\n" if node == 0 else "4096-4099\n"
            )
        for number, card in enumerate(cards):
            bus = card.split()[1]
            _write(root / f"sys/bus/pci/devices/{bus}/numa_node", f"{nodes[number % len(nodes)]}\n")
        plugin = self._directory / "packages"
        _write(
            plugin / "habana_torch_plugin-1.24.1.5.dist-info" / "METADATA",
            "Metadata-Version: 2.1\nName: habana-torch-plugin\nVersion: 1.24.1.5\n",
        )
        self.environment |= {
            "HL_SMI_CARDS": str(file),
            "SYSTEM_ROOT": str(root),
            "PYTHONPATH": f"{ROOT}:{plugin}:{VENDOR}",
        }

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            command,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
        )

    def launch(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run launch.sh to its end."""
        return self.run(str(GAUDI / "launch.sh"), *arguments, **variables)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The one sentence that a script ends with, behind what it told before."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
