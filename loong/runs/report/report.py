"""Pictures and one HTML page of runs, written to a folder."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import msgspec

from loong.model.sources.source import TINY
from loong.private_files import write_private
from loong.runs.background_load import SHARE_OF_OTHERS, background_load_note
from loong.runs.report.answer import ReportAnswer, answer
from loong.runs.report.facts import facts_of
from loong.runs.report.failures import failures_of
from loong.runs.report.inline_svg import inline_svg
from loong.runs.report.interactive import interactive_page, is_available
from loong.runs.report.late_requests import RequestStory
from loong.runs.report.pictures import Picture, Window, pictures_of_runs, timeline_pictures
from loong.runs.report.policy_words import words_of
from loong.runs.report.run_files import RunFiles, read_run_files
from loong.runs.report.tables import Table, all_numbers, tables_of
from loong.runs.report.watched import WatchedRun, watched_logs, watched_runs
from loong.runs.report.wrong_models import wrong_model_notes
from loong.server.metrics.trace import chrome_trace
from loong.workloads.report.run_document import RuleRuns, RunDocument, by_rule, measured, merged

PAGE = Path(__file__).parent / "page" / "report.html.jinja"


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture on the page: an SVG element and its caption."""

    svg: str
    words: str
    is_wide: bool


@dataclass(frozen=True, slots=True)
class Section:
    """The section on runs under one rule."""

    rule: str
    formula: str
    answer: ReportAnswer
    failures: Sequence[str]
    policies: str
    notes: Sequence[str]
    main: Sequence[Figure]
    others: Sequence[Figure]
    tables: Sequence[Table]
    stories: Mapping[str, Sequence[RequestStory]]
    interactive: Sequence[str]


def report_folder(folder: Path) -> list[Path]:
    """Draw the run whose document is in a folder, and write its report there; return the paths.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    return write_pictures_and_report(read_run_files([folder]), folder)


def write_pictures_and_report(files: RunFiles, folder: Path, window: Window | None = None) -> list[Path]:
    """Write everything that the files have something for; return the paths.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    written: list[Path] = []
    sections: list[Section] = []
    document = merged([document for _, document in files.documents])
    title = _title(document, list(files.histories))
    rules = [runs for runs in by_rule(document) if runs.runs] if document else []
    for number, runs in enumerate(rules, 1):
        assert document is not None
        suffix = f"-{number}" if number > 1 else ""
        watched = watched_runs(files, runs)
        pictures = pictures_of_runs(runs, watched, window, suffix)
        figures = _drawn(pictures, folder, number)
        written += [path for picture in pictures for path in picture.paths(folder)]
        interactive = _interactive(watched, folder, title, suffix)
        written += interactive
        num_main = sum(picture.is_main for picture in pictures)
        sections.append(_section(runs, watched, figures, num_main, [path.name for path in interactive]))
    logs, suffix = watched_logs(files), "-of-log" if sections else ""
    alone = list(timeline_pictures(logs, window, suffix))
    figures = _drawn(alone, folder, len(sections) + 1)
    written += [path for picture in alone for path in picture.paths(folder)]
    written += (of_logs := _interactive(logs, folder, title, suffix))
    for name in files.decisions:
        written.append(folder / f"trace-{name}.json")
        write_private(written[-1], chrome_trace(files.histories[name]))
    written.append(folder / "report.html")
    page = _page(sections, figures, document, list(files.histories), [path.name for path in of_logs])
    write_private(written[-1], page)
    return written


def _interactive(watched: Mapping[str, WatchedRun], folder: Path, title: str, suffix: str) -> list[Path]:
    """Write the interactive page of runs that have batches, if any has and its library is installed."""
    shown = {name: run for name, run in watched.items() if run.history.batches}
    if not shown or not is_available():
        return []
    path = folder / f"interactive{suffix}.html"
    write_private(path, interactive_page(shown, title))
    return [path]


def _section(
    runs: RuleRuns,
    watched: Mapping[str, WatchedRun],
    figures: Sequence[Figure],
    num_main: int,
    interactive: Sequence[str],
) -> Section:
    reported = answer(measured(runs))
    name, _, formula = runs.rule.description.partition(" (")
    return Section(
        rule=name,
        formula=formula.removesuffix(")"),
        answer=reported,
        failures=list(failures_of(runs)),
        policies=words_of(runs.policies),
        notes=list(_notes(runs)),
        main=figures[:num_main],
        others=figures[num_main:],
        tables=list(tables_of(runs)),
        stories={policy: stories for policy, run in watched.items() if (stories := run.late_stories)},
        interactive=interactive,
    )


def _drawn(pictures: Sequence[Picture], folder: Path, number: int) -> list[Figure]:
    """Write the pictures into a folder, and return them as parts of the page."""
    figures = []
    for index, picture in enumerate(pictures):
        picture.write(folder)
        svg = folder.joinpath(f"{picture.name}.svg").read_text(encoding="utf-8")
        words = picture.words
        figures.append(Figure(inline_svg(svg, f"p{number}-{index}", words), words, picture.is_wide))
    return figures


def _notes(runs: RuleRuns) -> Iterator[str]:
    """Yield the caveats that a reader must know with the numbers."""
    if runs.rule.planned_for is not None:
        yield (
            f"Runs under {runs.rule.planned_for}, for which policies planned, are judged again here: made "
            f"under {runs.rule.name}, some would plan otherwise."
        )
    shares = {
        policy: [run.number(SHARE_OF_OTHERS) for run in runs.runs if run.policy == policy]
        for policy in runs.policies
    }
    if (background_load := background_load_note(shares)) is not None:
        yield background_load
    yield from wrong_model_notes(runs)
    num_cut = sum(run.is_cut_off for run in runs.runs)
    if num_cut:
        yield (
            f"{num_cut} of {len(runs.runs)} runs were ended as soon as too many requests had missed; they "
            "are not drawn."
        )
    repeats_of = {len(runs.at(policy, runs.shown_rate)) for policy in runs.policies}
    if max(repeats_of, default=0) > 1:
        yield (
            f"Numbers are medians of {max(repeats_of)} repetitions; ranges and bands reach from the least to "
            "the greatest."
        )
        if runs.goodput:
            yield (
                "A policy reaches the goal at a rate if more than half of its repetitions do, there and at "
                "every lower rate."
            )


def _page(
    sections: Sequence[Section],
    figures: Sequence[Figure],
    document: RunDocument | None,
    logs: Sequence[str],
    interactive: Sequence[str],
) -> str:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(PAGE.read_text(encoding="utf-8"))
    return template.render(
        sections=sections,
        figures=figures,
        document=document,
        logs=logs,
        interactive=interactive,
        title=_title(document, logs),
        is_tiny=document is not None and _is_tiny(document),
        facts=[] if document is None else list(facts_of(document)),
        all_numbers=[] if document is None else list(all_numbers(document)),
    )


def _is_tiny(document: RunDocument) -> bool:
    """Return whether the random model was measured, which answers no question."""
    model = document.configuration.get("model")
    return model is not None and msgspec.json.decode(model) == TINY


def _title(document: RunDocument | None, logs: Sequence[str]) -> str:
    if document is None:
        return f"What ran: {', '.join(logs)}"
    workload = document.configuration.get("workload")
    on = f" on {msgspec.json.decode(workload)}" if workload else ""
    return f"{', '.join(dict.fromkeys(run.policy for run in document.runs))}{on}"
