"""The contract that keeps measurements out of what serves knows every module."""

from __future__ import annotations

from tests.house import COMMANDS, LAB_CONTRACT, contract_of, is_within, module_of, python_files


def test_every_module_serves_or_measures() -> None:
    contract = contract_of(LAB_CONTRACT)
    known = [*contract["source_modules"], *contract["forbidden_modules"]]
    unknown = [
        name
        for path in python_files()
        if (name := module_of(path)) not in COMMANDS
        # The file of a package that has both belongs to neither.
        and not is_within(name, known)
        and not any(each.startswith(f"{name}.") for each in known)
    ]
    assert not unknown, f"expected these in source_modules or forbidden_modules of pyproject: {unknown}"
