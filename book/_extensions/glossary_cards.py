"""Link the glossary's words where they are used, and ship their definitions with the pages for the cards on hover.

Notebooks are plain Markdown, so a chapter cannot mark its terms, and need not: in running text, the first use of a
term in each section becomes a link to the glossary. The definitions go into `_static/glossary_words.js`, a script and
not a file to fetch, so that cards open from a disk as well. `book/_static/glossary_cards.js` shows them.

Settings: `glossary_quiet`, terms so common that only their first use on a page is linked; `glossary_mute`, terms that
are never linked by themselves; `glossary_only`, beginnings of pages' names (a regular expression) -> terms that are
linked nowhere else, because elsewhere the word may mean something else; `glossary_not_in`, phrases in which no word is
linked, because a term in them means something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from sphinx import addnodes

CODE = (nodes.literal, nodes.literal_block, nodes.math, nodes.math_block, nodes.raw)
NOT_HERE = (*CODE, nodes.title, nodes.reference, nodes.citation, nodes.footnote, nodes.topic, addnodes.glossary)


class Term(NamedTuple):
    """A word of the glossary: its page, its anchor, and the anchor of its definition's first word."""

    page: str
    anchor: str
    group: str


def entries(app: Any) -> Iterator[tuple[str, nodes.definition_list_item]]:
    """Yield (page, item) for every definition in a glossary of the book."""
    labels = app.env.get_domain("std").objects.items()
    for page in sorted({page for (kind, _), (page, _) in labels if kind == "term"}):
        for glossary in app.env.get_and_resolve_doctree(page, app.builder).findall(addnodes.glossary):
            for item in glossary.findall(nodes.definition_list_item):
                yield page, item


def collect(app: Any, env: Any) -> None:
    """Read the finished glossary into `app.glossary_terms`, written form -> Term, and write the cards' script."""
    app.glossary_terms = {}
    if app.builder.format != "html":
        return
    found, cards = {}, {}
    for page, item in entries(app):
        words = list(item.findall(nodes.term))
        definition = next(item.findall(nodes.definition)).deepcopy()
        for link in list(definition.findall(nodes.reference)):  # a card cannot be entered to follow them
            link.replace_self(link.children)
        written = app.builder.render_partial(definition)["fragment"]
        written = re.sub(r"\A\s*<dd>|</dd>\s*\Z|\s+id=\"[^\"]*\"", "", written).strip()
        for word in words:
            found[word.astext()] = Term(page, word["ids"][0], words[0]["ids"][0])
            cards[word["ids"][0]] = {"word": escape(word.astext()), "html": written}
    app.glossary_terms = found
    script = Path(app.outdir, "_static", "glossary_words.js")
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(f"window.GLOSSARY = {json.dumps(cards, sort_keys=True)};\n", encoding="utf-8")


def pattern(words: list[str]) -> re.Pattern[str]:
    """Return what finds these words, the longest first: whole, also as plurals, and in any case if written in lower.

    A hyphen in a word stands for an en dash too, so that Newton-Schulz is found however it is typed.
    """

    def one(word: str) -> str:
        text = re.sub(r"[-–]", "[-–]", re.sub(r"(\\ )+", r"\\s+", re.escape(word).replace(r"\-", "-")))
        return f"(?i:{text}(?:e?s)?)" if word == word.lower() else f"{text}s?"

    any_word = "|".join(one(word) for word in sorted(words, key=lambda word: (-len(word), word)))
    return re.compile(rf"(?<![\w–-])(?:{any_word})(?!\w|[-–]\w)")


def link(app: Any, doctree: nodes.document, page: str) -> None:
    """Link the first use of each term per section of a page; the sections are those right below its title."""
    for xref in doctree.findall(nodes.inline):
        if "std-term" in xref["classes"] and isinstance(xref.parent, nodes.reference):
            xref.parent["classes"].append("glossary-term")  # a card for the words that an author marked, too
    terms = getattr(app, "glossary_terms", {})
    elsewhere = [word for where, only in app.config.glossary_only.items() if not re.match(where, page) for word in only]
    words = [word for word in terms if word not in (*app.config.glossary_mute, *elsewhere)]
    if not words or page in {term.page for term in terms.values()}:
        return
    written = {_plain(word) + end: terms[word] for word in words for end in ("es", "s")}
    written |= {_plain(word): terms[word] for word in words}
    quiet = {terms[word].group for word in app.config.glossary_quiet if word in terms}
    finder, seen = pattern([*words, *app.config.glossary_not_in]), set()
    for text in list(doctree.findall(nodes.Text)):
        section = _section(text)
        if section is None:
            continue
        pieces: list[nodes.Node] = []
        rest = 0
        for match in finder.finditer(text):
            term = written.get(_plain(match[0]))
            if term is None:  # a phrase of `glossary_not_in`
                continue
            key = (term.group, None if term.group in quiet else section)
            if key in seen:
                continue
            seen.add(key)
            uri = f"{app.builder.get_relative_uri(page, term.page)}#{term.anchor}"
            reference = nodes.reference("", match[0], refuri=uri, internal=True, classes=["glossary-term"])
            pieces += [nodes.Text(text[rest : match.start()]), reference]
            rest = match.end()
        if pieces:
            text.parent.replace(text, [*pieces, nodes.Text(text[rest:])])


def _section(text: nodes.Text) -> int | None:
    """Return a number for the section this text stands in, or None where it is not running text."""
    above: list[nodes.Node] = []
    node = text.parent
    while node is not None:
        above.append(node)
        node = node.parent
    if any(isinstance(node, NOT_HERE) for node in above) or not any(isinstance(n, nodes.paragraph) for n in above):
        return None
    sections = [id(node) for node in above if isinstance(node, nodes.section)]
    return sections[-2] if len(sections) > 1 else 0


def _plain(word: str) -> str:
    return re.sub(r"\s+", " ", word).replace("–", "-").lower()


def setup(app: Any) -> dict[str, bool]:
    """Collect once every page is read; link when a page is about to be written."""
    app.add_config_value("glossary_quiet", [], "env")
    app.add_config_value("glossary_mute", [], "env")
    app.add_config_value("glossary_only", {}, "env")
    app.add_config_value("glossary_not_in", [], "env")
    app.set_html_assets_policy("always")  # a card may show a formula on a page that has none
    app.add_js_file("glossary_words.js", loading_method="defer")
    app.add_js_file("glossary_cards.js", loading_method="defer")
    app.connect("env-check-consistency", collect)
    app.connect("doctree-resolved", link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
