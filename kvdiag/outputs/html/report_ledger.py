"""The ledger of a report: a bar of parts against the capacity of each GPU, and the same as a table. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvdiag.model import Device, Diagnosis, LedgerLine, Timeline
from kvdiag.outputs.html.markup import Html, element
from kvdiag.outputs.html.svg_plots import Part, bar
from kvdiag.outputs.terminal.text import readable


def memory(diagnosis: Diagnosis, timeline: Timeline) -> Html:
    """Every GPU with its lines; without one, what the engine tells of its pool."""
    newest = {device.uuid: device for sample in timeline.samples for device in sample.devices or ()}
    lines: dict[str | None, list[LedgerLine]] = {}
    for line in diagnosis.ledger:
        lines.setdefault(line.uuid, []).append(line)
    parts = [_gpu(number, newest.get(uuid or ""), own) for number, (uuid, own) in enumerate(lines.items())]
    parts += [
        element("p", f"GPU {device.index} {device.name}: its memory cannot be read.", class_="unseen")
        for device in newest.values()
        if device.memory is None and device.uuid not in lines
    ]
    if all(line.gpu is None for line in diagnosis.ledger):
        parts.insert(0, element("p", "Device memory was not seen.", class_="unseen"))
    return element("div", *parts, class_="gpus")


def _gpu(number: int, device: Device | None, lines: Sequence[LedgerLine]) -> Html:
    used = sum(line.bytes for line in lines)
    total = None if device is None or device.memory is None else device.memory.total_bytes
    gpu = lines[0].gpu
    title = "KV pool, as the engine tells it" if gpu is None else f"GPU {gpu}"
    name = "" if device is None else device.name
    whole = max(total or used, 1)
    scale = (
        f"{readable(used)} in all"
        if total is None
        else f"{readable(used)} of {readable(total)} used ({used / total:.0%}), {readable(total - used)} free"
    )
    told = ", ".join(f"{line.component.replace('_', ' ')} {readable(line.bytes)}" for line in lines)
    head = element(
        "tr",
        *(
            element("th", name, scope="col", class_=style)
            for name, style in (
                ("component", ""),
                ("bytes", "number"),
                ("share", "number"),
                ("known by", "source"),
                ("what it is", "detail"),
            )
        ),
    )
    return element(
        "section",
        element("h3", f"{title} ", element("small", name)),
        element("p", scale, class_="dim"),
        bar(f"ledger-{number}", f"{title}: {scale}", told, list(_parts(lines)), whole),
        element("div", element("table", head, *_rows(lines, whole), class_="ledger"), class_="scroll"),
        class_="gpu",
    )


def _parts(lines: Sequence[LedgerLine]) -> Iterator[Part]:
    for line in lines:
        told = f"{line.component.replace('_', ' ')}: {readable(line.bytes)}"
        yield Part(style=line.component, size=line.bytes, told=told)


def _rows(lines: Sequence[LedgerLine], whole: int) -> Iterator[Html]:
    for line in lines:
        yield element(
            "tr",
            element(
                "th",
                element("i", class_=f"swatch {line.component}", aria_hidden="true"),
                line.component.replace("_", " "),
                scope="row",
            ),
            element("td", readable(line.bytes), class_="number"),
            element("td", f"{line.bytes / whole:.1%}", class_="number"),
            element("td", line.source, class_="source dim"),
            element("td", line.detail, class_="detail dim"),
        )
