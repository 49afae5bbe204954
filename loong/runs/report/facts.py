"""The facts that accompany the numbers of a report, so that others can reproduce them."""

from collections.abc import Iterator

import msgspec

from loong.workloads.report.run_document import RunDocument


def facts_of(document: RunDocument) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each fact that is needed to reproduce a run."""
    yield "command", document.command
    yield "date", document.date
    commit = document.machine.get("git_commit")
    yield "commit", commit or "not known"
    for name, value in document.machine.items():
        if name != "git_commit":
            yield name.replace("_", " "), value
    probe = msgspec.json.decode(document.prefill_probe)
    if probe is not None:
        yield "unloaded prefill, as probed", _flat(probe)
    for name, raw in document.configuration.items():
        value = msgspec.json.decode(raw)
        if value is not None:
            yield name.replace("_", " "), _flat(value)


def _flat(value: object) -> str:
    """Return a value of the configuration in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_flat(part)}" for name, part in value.items() if part is not None)
    if isinstance(value, list):
        return ", ".join(map(_flat, value)) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
