"""The report as one page that needs nothing else."""

from __future__ import annotations

from html import escape
from typing import Any

from .table import LEGEND, Notes, cell, verdict

Result = dict[str, Any]
SIGNS = {"agrees": "✓", "rounds": "≈", "differs": "✗", "raises": "!", "absent": "–"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2rem auto; max-width: 75rem; padding: 0 1rem }
h1 { font-size: 1.4rem } table { border-collapse: collapse; width: 100%; margin: 1.5rem 0 }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #e4e4e4; text-align: left; white-space: nowrap }
thead th { position: sticky; top: 0; background: #fff; border-bottom: 2px solid #444 }
tr.first td { border-top: 1px solid #999 } .scope { color: #767676 }
.agrees { color: #00785a } .rounds { color: #8a6100 } .absent { color: #999 }
.differs, .raises { color: #b3261e; font-weight: 600 }
ol { padding-left: 1.5rem } sup a { text-decoration: none; color: inherit }
div { overflow-x: auto }
"""


def page(results: list[Result]) -> str:
    """The matrix and its footnotes as HTML."""
    ran = [result for result in results if "rows" in result]
    notes = Notes()
    body = "".join(_rows(ran, notes))
    heads = "".join(f"<th>{escape(result['framework'])}<br><small>{escape(result['version'])}</small></th>" for result in ran)
    absent = "".join(
        f"<li>{escape(result['framework'])}: {escape(result['said'])}</li>" for result in results if "rows" not in result
    )
    footnotes = "".join(f'<li id="note{i}">{escape(text)}</li>' for i, text in enumerate(notes.texts, 1))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>gradclip verify</title><style>{STYLE}</style><h1>The library and the frameworks, against float64</h1>"
        f"<p>{escape(verdict(ran).capitalize())}.</p><p>{escape(LEGEND)}</p>"
        f"<div><table><thead><tr><th>case</th><th>scope</th>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
        f"<h2>Why</h2><ol>{footnotes}</ol>" + (f"<h2>Not there</h2><ul>{absent}</ul>" if absent else "") + "</html>\n"
    )


def _rows(ran: list[Result], notes: Notes) -> list[str]:
    by = [{(row["case"], row["scope"]): row for row in result["rows"]} for result in ran]
    found, last = [], None
    for case, scope in dict.fromkeys(key for rows in by for key in rows):
        cells = "".join(_cell(rows.get((case, scope)), notes) for rows in by)
        name, first = (escape(case), ' class="first"') if case != last else ("", "")
        found.append(f'<tr{first}><td>{name}</td><td class="scope">{scope}</td>{cells}</tr>')
        last = case
    return found


def _cell(row: dict[str, Any] | None, notes: Notes) -> str:
    ours, theirs, note = cell(row)
    number = notes.number(note) if note else 0
    mark = f'<sup><a href="#note{number}">{number}</a></sup>' if number else ""
    title = f' title="{escape(str(row["own"]["said"]))}"' if row and row["own"] and note else ""
    sides = (f'<span class="{side}">{SIGNS[side]}</span>' for side in (ours, theirs))
    return f"<td{title}>{' '.join(sides)}{mark}</td>"
