"""The page of `longring bench`: longring and its peers side by side, how they scale, what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from . import bars, curves, errors, foreseen
from .asked import asked
from .attending import Scene
from .common import mark
from .figure import bullets, folded, paragraph, table
from .markup import Markup, tag, together
from .page import Part
from .told import Told, shown, spoken

Group = tuple[str, str, str, int, int]
LONG = 24  # rows, beyond which a table is folded
KINDS = {
    "kernel": "a kernel called directly",
    "package": "an installed package",
    "re-created": "re-created here after its authors' description",
}


def scenes(record: dict[str, Any]) -> Iterator[Callable[[], Scene]]:
    """One for every schedule and layout of ours, at its largest."""
    arguments = record.get("arguments") or {}
    largest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in record.get("rows", []):
        if row.get("kind") == "ours" and row.get("schedule") and (row.get("ranks") or 1) > 1:
            key = row["schedule"], row.get("layout"), row.get("scenario"), str(_shape(row))
            if key not in largest or _size(row) > _size(largest[key]):
                largest[key] = row
    for row in largest.values():
        words = {key: row.get(key) for key in ("layout", "schedule", "tokens", "ranks")}
        yield lambda words=words, row=row: Scene(asked({**arguments, **_shape(row)}, **words))


def _size(row: dict[str, Any]) -> tuple[int, int]:
    return row.get("ranks") or 1, row.get("tokens") or 0


def _shape(row: dict[str, Any]) -> dict[str, Any]:
    names = "causal", "window", "dilated", "heads", "kv_heads", "nodes"
    return {name: row[name] for name in names if row.get(name) is not None}


def verdict(told: Told) -> tuple[object, bool | None]:
    wrong = [row for row in told["rows"] if not _is_right(row)]
    ours = [row for row in wrong if row["kind"].value == "ours"]
    failures = len(told["failures"].value or [])
    rows = list(told["rows"])
    judged = sum(bool(row["allowed"]) for row in rows)
    which = "each" if judged == len(rows) else f"{judged:,} of them"
    text = f"{_rows(len(rows))}, {which} checked against the float64 definition before it was timed: "
    if not wrong and not failures:
        return text + "all are right.", True
    blame = [f"{_rows(len(wrong))} wrong, {len(ours) or 'none'} of them longring's"] if wrong else ["all are right"]
    blame += [f"{failures} could not be run"] if failures else []
    return f"{text}{'; '.join(blame)}.", False if ours or failures else None


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


def _is_right(row: Told) -> bool:
    return all(judged.is_ok for judged in errors.of_rows([("", row)]))


def counted(record: dict[str, Any]) -> dict[str, Any]:
    """Times that perfect scaling would give, those of the fewest ranks, divided; and times predicted, row by row."""
    ideal = []
    for group in _scaling_groups(record.get("rows", [])):
        known = [(row["ranks"], row["time"]["median"]) for row in group if _seconds(row) is not None]
        if len({ranks for ranks, _ in known}) < 2:
            continue
        fewest = min(ranks for ranks, _ in known)
        best = min(seconds for ranks, seconds in known if ranks == fewest)
        rows = [{"ranks": ranks, "seconds": best * fewest / ranks} for ranks in sorted({r for r, _ in known})]
        ideal.append({"group": _scaling_key(group[0]), "rows": rows})
    foreseen_seconds = [foreseen.seconds(row, _shape(row), record) for row in record.get("rows", [])]
    return {"ideal": ideal, "predicted_seconds": foreseen_seconds}


def _seconds(row: dict[str, Any]) -> float | None:
    return (row.get("time") or {}).get("median")


def _scaling_key(row: dict[str, Any]) -> str:
    """What a row has in common with those that differ in ranks and name alone."""
    words = [row.get("scenario"), _shape_words(row), row.get("phase"), f"{spoken(row.get('tokens'))} tokens"]
    return ", ".join(dict.fromkeys(str(word) for word in words if word))


def _shape_words(row: dict[str, Any]) -> str:
    if row.get("dilated"):
        return f"dilated {row['dilated']}"
    window = f"window {row['window']:,}" if row.get("window") else ""
    causal = "" if row.get("causal") is None else "causal" if row["causal"] else "full"
    return ", ".join(filter(None, (causal, window)))


def _scaling_groups(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows that differ in ranks and name alone."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(_scaling_key(row), []).append(row)
    return list(found.values())


def parts(told: Told, tiles: list[Part]) -> list[Part]:
    rows = list(told["rows"])
    made = [Part("peers", "Side by side", _peers(told, rows))]
    if scaling := [*_against_ranks(told, rows), *_against_tokens(told, rows)]:
        made.append(Part("scaling", "How it scales", scaling))
    if memory := _memory(rows):
        made.append(Part("memory", "What a rank holds", memory))
    if judged := errors.of_rows([(_title(row), row) for row in rows]):
        caption = (
            "Relative error against the float64 definition, measured before anything was timed, and the budget's share."
        )
        made.append(Part("errors", "How exact it is", [_long(len(rows), errors.draw("budgets", caption, judged))]))
    return [*made, *tiles, Part("table", "All rows", [_long(len(rows), _table(rows))])]


def _long(rows: int, drawn: Markup) -> Markup:
    return folded(_rows(rows), drawn) if rows > LONG else drawn


# ------------------------------------------------------------------------------------------------ side by side


def _peers(told: Told, rows: list[Told]) -> list[object]:
    """The largest size for all to see, the others folded."""
    groups: dict[Group, list[Told]] = {}
    for row in rows:
        groups.setdefault(_group(row), []).append(row)
    ordered = sorted(groups, key=lambda group: (-len(groups[group]), -group[3], -group[4]))
    drawn = [_bars(f"peers{index}", group, groups[group]) for index, group in enumerate(ordered)]
    made: list[object] = [
        paragraph("Bars are medians, whiskers the quartiles of the runs, which were interleaved. Shorter is faster."),
        *drawn[:1],
    ]
    if drawn[1:]:
        made.append(folded(f"The other {len(drawn) - 1} sizes and passes", *drawn[1:]))
    for title, key in (("Not installed or not usable here", "missing"), ("Could not be run", "failures")):
        if told[key]:
            made += [tag("h3", title), bullets([_line(one) for one in told[key]])]
    return made


def _line(told: Told) -> str:
    if isinstance(told.value, dict):
        return ", ".join(f"{key}: {value.text}" for key, value in told.items())
    return told.text


def _group(row: Told) -> Group:
    return (
        row["scenario"].text,
        row["case"].text,
        row["phase"].text,
        int(row["tokens"].number),
        int(row["ranks"].number or 1),
    )


def _spoken(group: Group) -> str:
    """The case, and what it does not say itself."""
    scenario, case, phase, tokens, ranks = group
    words = [case or scenario, phase]
    words += [f"{tokens:,} tokens"] if tokens and "n =" not in case else []
    words += [f"{ranks} rank{'s' if ranks > 1 else ''}"] if "rank" not in case else []
    return ", ".join(dict.fromkeys(filter(None, words)))


def _bars(name: str, group: Group, rows: Sequence[Told]) -> Markup:
    ordered = sorted(rows, key=lambda row: row["time"]["median"].number)
    against = list(dict.fromkeys(key for row in ordered for key, ratio in row["ratios"].items() if ratio.is_number))
    made = [
        bars.Bar(
            _name(row),
            row["time"]["median"],
            low=row["time"]["low"],
            high=row["time"]["high"],
            kind="faulty" if not _is_right(row) else "ours" if row["kind"].value == "ours" else "other",
            more=(*(_ratio(row["ratios"][key]) for key in against), shown(row["tflops"]), _verdict(row)),
        )
        for row in ordered
    ]
    return bars.draw(
        name,
        f"{group[0][:1].upper()}{group[0][1:]}: {_spoken(group)}.",
        made,
        "seconds",
        what="who",
        value="median (quartiles)",
        more=(*(key if key.startswith("times") else f"times {key}" for key in against), "TFLOP/s", "verdict"),
    )


def _ratio(ratio: Told) -> Markup | None:
    return shown(ratio, "ratio") if ratio.is_number else None


def _verdict(row: Told) -> Markup:
    return mark(True) if _is_right(row) else together(mark(False), f" {row['note'].text}")


def _name(row: Told) -> Markup:
    how = ", ".join(dict.fromkeys(filter(None, (row["schedule"].text, row["layout"].text, row["kernel"].text))))
    kind = "" if row["kind"].value == "ours" else KINDS.get(row["kind"].text, row["kind"].text)
    words = ", ".join(filter(None, (kind, how)))
    return together(row["name"].text, tag("small", f" ({words})") if words else None)


# ------------------------------------------------------------------------------------------------ scaling


def _against_ranks(told: Told, rows: list[Told]) -> Iterator[Markup]:
    groups = [
        (ideal, [r for r in rows if _scaling_key(r.value) == ideal["group"].value]) for ideal in told["drawn"]["ideal"]
    ]
    shown_groups = sorted(groups, key=lambda pair: -max(row["tokens"].number for row in pair[1]))[:4]
    for index, (ideal, some) in enumerate(shown_groups):
        lines = list(_lines(told, some, "ranks"))
        points = [(row["ranks"], row["seconds"]) for row in ideal["rows"]]
        lines.append(curves.Curve("fastest of the fewest ranks, divided", points, "ideal", 6))
        yield curves.draw(
            f"ranks{index}",
            f"Time against the number of ranks: {ideal['group'].text}. Both axes are logarithmic.{_explained(told)}",
            lines,
            curves.Axes("ranks", "time", y_unit="seconds"),
        )


def _against_tokens(told: Told, rows: list[Told]) -> Iterator[Markup]:
    groups: dict[tuple[str, str, str, int], list[Told]] = {}
    for row in rows:
        key = row["scenario"].text, _shape_words(row.value), row["phase"].text, int(row["ranks"].number or 1)
        groups.setdefault(key, []).append(row)
    wide = {key: some for key, some in groups.items() if len({row["tokens"].value for row in some}) > 1}
    most = max((key[-1] for key in wide), default=0)
    for index, ((*names, ranks), some) in enumerate(wide.items()):
        if ranks == most and index < 8:
            words = ", ".join(filter(None, names))
            yield curves.draw(
                f"tokens{index}",
                f"Time against the length of the sequence: {words}, {ranks} rank{'s' if ranks > 1 else ''}. "
                f"Both axes are logarithmic.{_explained(told)}",
                list(_lines(told, some, "tokens")),
                curves.Axes("tokens", "time", y_unit="seconds"),
            )


def _explained(told: Told) -> str:
    shares = " Ranks of one machine share its cores." if told["machine"]["device"].value == "cpu" else ""
    has_some = any(seconds.is_number for seconds in told["drawn"]["predicted_seconds"])
    return shares + (f" {foreseen.WORDS}" if has_some else "")


def _predicted(told: Told, row: Told) -> Told:
    """By the record itself, or by this page."""
    own = row["predicted_seconds"]
    return own if own.is_number else told["drawn"]["predicted_seconds"][int(row.at.rsplit("/", 1)[1])]


def _lines(told: Told, rows: Iterable[Told], along: str) -> Iterator[curves.Curve]:
    named: dict[str, list[Told]] = {}
    for row in rows:
        named.setdefault(_label(row), []).append(row)
    for colour, (name, some) in enumerate(named.items()):
        ordered = sorted(some, key=lambda row: row[along].number)
        measured = [(row[along], row["time"]["median"]) for row in ordered if row["time"]["median"].is_number]
        foreseen_points = [(row[along], _predicted(told, row)) for row in ordered]
        predicted = [(x, seconds) for x, seconds in foreseen_points if seconds.is_number]
        yield curves.Curve(name, measured, "measured", colour)
        if predicted:
            yield curves.Curve(name, predicted, "predicted", colour)


def _label(row: Told) -> str:
    layout = row["layout"].text
    return row["name"].text + (f", {layout}" if layout and layout not in row["name"].text else "")


# ------------------------------------------------------------------------------------------------ memory


def _memory(rows: list[Told]) -> list[Markup]:
    """Of the longest sequence, by ranks: what was measured, and under it what the plan predicts."""
    held = [row for row in rows if _peak(row).is_number]
    longest = max((row["tokens"].number for row in held), default=0)
    groups: dict[tuple[str, str], list[Told]] = {}
    for row in held:
        if row["tokens"].number == longest:
            groups.setdefault((row["scenario"].text, row["phase"].text), []).append(row)
    made = []
    for index, ((scenario, phase), some) in enumerate(groups.items()):
        ordered = sorted(some, key=lambda row: (_label(row), row["ranks"].number))
        words = ", ".join(filter(None, (scenario, phase)))
        caption = (
            f"Most bytes that a rank held against the number of ranks: {words}, {spoken(int(longest))} tokens. "
            "Under what was measured stands what the plan predicts, with dashed outlines."
        )
        drawn = [bar for row in ordered for bar in _held_bars(row)]
        made.append(
            bars.draw(f"held{index}", caption, drawn, "bytes", what="who, on how many ranks", value="peak of a rank")
        )
    return made


def _peak(row: Told) -> Told:
    peak = row["peak_bytes"]
    return max(peak, key=lambda rank: rank.number, default=peak) if isinstance(peak.value, list) else peak


def _held_bars(row: Told) -> Iterator[bars.Bar]:
    title = f"{_label(row)}: {row['ranks'].text} rank{'s' if row['ranks'].number > 1 else ''}"
    kind = "ours" if row["kind"].value == "ours" else "other"
    predicted = row["predicted"]["components"] if row["predicted"]["components"] else row["predicted_components"]
    total = row["predicted_bytes"] if row["predicted_bytes"] else row["predicted"]["peak_bytes"]
    yield bars.Bar(f"{title}, measured", _peak(row), row["components"].items(), kind=kind)
    if total.is_number:
        yield bars.Bar(f"{title}, predicted", total, predicted.items(), kind="predicted")


# ------------------------------------------------------------------------------------------------ all rows


def _title(row: Told) -> str:
    return f"{_label(row)}: {_spoken(_group(row))}"


def _table(rows: list[Told]) -> Markup:
    columns = ["who", "scenario", "case", "pass", "kernel", "tokens", "ranks", "median", "low", "high", "runs"]
    columns += ["TFLOP/s", "peak of a rank", "verdict"]
    cells = [
        [
            _label(row),
            row["scenario"].text,
            row["case"].text,
            row["phase"].text,
            row["kernel"].text,
            shown(row["tokens"]),
            shown(row["ranks"]),
            *(shown(row["time"][key], "seconds") for key in ("median", "low", "high")),
            shown(row["time"]["runs"]),
            shown(row["tflops"]),
            shown(_peak(row), "bytes"),
            mark(_is_right(row)),
        ]
        for row in rows
    ]
    return table("Every row that was timed", columns, cells, words=5)
