"""What every page needs and no author should have to type: descriptions of pictures and pages, where code may break."""

from __future__ import annotations

from html import escape
from textwrap import shorten
from typing import Any
from urllib.parse import urlsplit

from docutils import nodes

LONGEST_TOKEN = 24  # characters: about 200 pixels, half of a phone


def describe_pictures(app: Any, doctree: nodes.document) -> None:
    """Take the text beside a picture in a notebook's output for its alt text.

    An output holds the same thing in several formats, and `notebook.picture` puts the description there as plain text.
    A bare `<Figure size ...>` is no description; an image left with that fails a test.
    """
    for bundle in doctree.findall(lambda node: getattr(node, "attributes", {}).get("nb_element") == "mime_bundle"):
        texts = [part.astext().strip() for part in bundle.children if part.get("mime_type") == "text/plain"]
        if texts and texts[0] and not texts[0].startswith("<"):
            for image in bundle.findall(nodes.image):
                image["alt"] = " ".join(texts[0].split())


def mark_long_code(app: Any, doctree: nodes.document) -> None:
    """Give inline code with a token that may not fit beside anything the class `long-code`; all other stays whole."""
    for code in doctree.findall(nodes.literal):
        if max(map(len, code.astext().split()), default=0) > LONGEST_TOKEN:
            code["classes"].append("long-code")


def describe_page(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Give search engines and link previews the opening paragraph, cut after a word, instead of the first 200 letters.

    A link to Colab is a button, not a part of what a page says.
    """
    for paragraph in doctree.findall(nodes.paragraph) if doctree is not None else ():
        spoken = paragraph.deepcopy()
        for link in list(spoken.findall(nodes.reference)):
            if link.get("refuri", "").startswith("https://colab."):
                link.parent.remove(link)
        if text := shorten(spoken.astext(), 240, placeholder=" …"):
            context["meta"] = {**(context.get("meta") or {}), "og:description": text}
            context["metatags"] = f'{context.get("metatags", "")}\n<meta name="description" content="{escape(text)}" />'
            return


def set_address(app: Any, config: Any) -> None:
    """Derive where GitHub Pages publishes the book from the repository's address, so that there is one place for it."""
    owner, _, name = urlsplit(config.html_theme_options.get("repository_url", "")).path.strip("/").partition("/")
    if name:
        config.ogp_site_url = f"https://{owner}.github.io/{name}/"


def setup(app: Any) -> dict[str, bool]:
    """Describe pictures while an output still has all its formats, which is before any page is written."""
    app.connect("doctree-read", describe_pictures)
    app.connect("doctree-read", mark_long_code)
    app.connect("html-page-context", describe_page, priority=400)  # before OpenGraph looks for a description
    app.connect("config-inited", set_address)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
