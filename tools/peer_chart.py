"""Draws tools/deepspeed.svg: bytes, step time and memory beside DeepSpeed's, from the table that tools/README.md records.

python tools/peer_chart.py            # prints the SVG
python tools/peer_chart.py --write    # writes tools/deepspeed.svg
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

from pages import print_or_write

HERE = Path(__file__).resolve().parent
PICTURE = HERE / "deepspeed.svg"
_LEFT, _PANEL, _GAP, _ROW, _TOP = 160, 205, 62, 22, 72
_COLOURS = {"Infinity": "#1f6feb", "DeepSpeed, lean": "#9aa4b2", "DeepSpeed, pipelined": "#6b7685"}
_TITLES = ("read + written per parameter, bytes", "step, seconds", "peak host memory, GB")


@dataclass(frozen=True)
class Row:
    """One line of the table: who did it in which case, bytes per parameter and step, seconds, gigabytes."""

    case: str
    who: str
    read: float
    written: float
    seconds: float
    gigabytes: float
    commit: str

    @property
    def bars(self) -> tuple[tuple[float, str], ...]:
        """Length and label in each panel."""
        return (
            (self.read + self.written, f"{self.read:.2f} + {self.written:.2f}"),
            (self.seconds, f"{self.seconds:.2f}"),
            (self.gigabytes, f"{self.gigabytes:.2f}"),
        )


def rows(readme: str) -> list[Row]:
    """The table of the section "Against DeepSpeed"."""
    section = readme.split("### Against DeepSpeed")[1].split("\n### ")[0]
    found = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and re.fullmatch(r"[0-9a-f]{7}", cells[5]):
            read, written = map(float, cells[3].removesuffix(" B").split(" / "))
            seconds, gigabytes = float(cells[2].removesuffix(" s")), float(cells[4].removesuffix(" GB"))
            found.append(Row(cells[0], cells[1], read, written, seconds, gigabytes, cells[5]))
    return found


def _text(x: float, y: float, words: str, *, size: int = 12, weight: str = "normal", colour: str = "#1f2328") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="{colour}">{escape(words)}</text>'


def draw(table: list[Row]) -> str:
    """The SVG."""
    width = _LEFT + 3 * (_PANEL + _GAP)
    parts = [
        _text(
            16,
            26,
            "One optimizer step of a 374M-parameter Llama (bf16, AdamW), offloaded to a disk held to 600 MB/s each way",
            size=14,
            weight="bold",
        )
    ]
    longest = [max(row.bars[panel][0] for row in table) for panel in range(3)]
    for panel, title in enumerate(_TITLES):
        parts.append(_text(_LEFT + panel * (_PANEL + _GAP), 52, title, weight="bold"))
    y, case = _TOP - 16, None
    for row in table:
        if row.case != case:
            case = row.case
            told = case.replace("1 *", "1").replace("1,", "1 micro-batch,")
            told = f"{told} micro-batch{'es' if told != '1' else ''}" if "micro" not in told else told
            y += 26
            parts.append(_text(16, y - 4, told, weight="bold"))
        parts.append(_text(16, y + 15, row.who))
        colour = _COLOURS[row.who if row.who in _COLOURS else row.who.split(",")[0]]
        for panel, (length, label) in enumerate(row.bars):
            x = _LEFT + panel * (_PANEL + _GAP)
            drawn = max(_PANEL * 0.75 * length / longest[panel], 1)
            parts.append(f'<rect x="{x}" y="{y + 3}" width="{drawn:.1f}" height="{_ROW - 6}" fill="{colour}"/>')
            parts.append(_text(x + drawn + 5, y + 15, label))
        y += _ROW
    commits = ", ".join(dict.fromkeys(row.commit for row in table))
    notes = (
        "tools/bench_step.py --seq-len 64 --throttle 600 --micro-batches 1,8 --peer deepspeed --turns 1 "
        "(equal memory: --budget 6GB).",
        "2 cores of an AMD EPYC, 25 GB, no GPU, torch 2.13.0, DeepSpeed 0.19.8 on its CPU accelerator. First recorded with "
        f"commits {commits}.",
        "Behind Infinity stands its host_memory_budget. Other programs ran beside the first three. More: tools/README.md.",
    )
    for number, note in enumerate(notes):
        parts.append(_text(16, y + 28 + 17 * number, note, size=11, colour="#59636e"))
    height = y + 28 + 17 * len(notes)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            'font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def picture() -> str:
    """That of the README's table."""
    return draw(rows((HERE / "README.md").read_text()))


if __name__ == "__main__":
    print_or_write(__doc__, PICTURE, picture, picture)
