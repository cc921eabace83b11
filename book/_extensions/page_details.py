"""What every page needs and no author should have to type: descriptions of pictures and pages, where code may break."""

from __future__ import annotations

from html import escape
from pathlib import Path
from textwrap import shorten
from typing import Any
from urllib.parse import urljoin, urlsplit

from docutils import nodes

COLAB = "https://colab."  # how a link begins that opens a chapter there
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


def introduction(doctree: nodes.document) -> str:
    """Return the opening paragraph of a page, cut after a word; "" for a page without one.

    A link to Colab is a button, not a part of what a page says.
    """
    for paragraph in doctree.findall(nodes.paragraph):
        spoken = paragraph.deepcopy()
        for link in list(spoken.findall(nodes.reference)):
            if link.get("refuri", "").startswith(COLAB):
                link.parent.remove(link)
        if text := shorten(spoken.astext(), 240, placeholder=" …"):
            return text
    return ""


def describe_page(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Give search engines and link previews the introduction instead of the first 200 letters."""
    if doctree is not None and (text := introduction(doctree)):
        context["meta"] = {**(context.get("meta") or {}), "og:description": text}
        context["metatags"] = f'{context.get("metatags", "")}\n<meta name="description" content="{escape(text)}" />'


def open_alike(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Let the button above a chapter open in Colab what the link on its page opens, and not always the branch main."""
    links = [link.get("refuri", "") for link in doctree.findall(nodes.reference)] if doctree is not None else []
    for link in [link for link in links if link.startswith(COLAB)][:1]:
        for group in context.get("header_buttons", []):
            for button in group.get("buttons", []):
                if button.get("url", "").startswith(COLAB):
                    button["url"] = link


def write_root_page(app: Any, exception: Exception | None) -> None:
    """Write what the bare address of the book answers: it leads to page one, and introduces itself to link previews.

    Where there is none, sphinx-external-toc writes one without a title.
    """
    if exception is not None or app.builder.name != "html" or app.config.master_doc == "index":
        return
    config, first = app.config, f"{app.config.master_doc}.html"
    said = introduction(app.env.get_doctree(config.master_doc))
    named = {"description": said, "twitter:card": "summary_large_image"}
    graph = {"title": config.project, "type": "website", "site_name": config.project, "description": said}
    graph |= {"url": config.ogp_site_url, "image": urljoin(config.ogp_site_url, config.ogp_image)}
    graph |= {"image:alt": config.ogp_image_alt}
    tags = [f'<meta name="{name}" content="{escape(text)}" />' for name, text in named.items()]
    tags += [f'<meta property="og:{name}" content="{escape(text)}" />' for name, text in graph.items()]
    title = escape(config.project)
    Path(app.outdir, "index.html").write_text(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8" />\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1" />\n'
        f"<title>{title}</title>\n" + "\n".join(tags) + f'\n<meta http-equiv="refresh" content="0; url={first}" />\n'
        f'</head>\n<body><p><a href="{first}">{title}</a>: {escape(said)}</p></body>\n</html>\n',
        encoding="utf-8",
    )


def set_address(app: Any, config: Any) -> None:
    """Derive where the book is published from the repository's address, so that there is one place for it.

    That is GitHub Pages, if html.baseurl of _config.yml says nothing else. On Hugging Face there is no such place, and
    the theme, which knows no repository there, has no buttons for one.
    """
    options = config.html_theme_options
    address = urlsplit(options.get("repository_url", ""))
    owner, _, name = address.path.strip("/").partition("/")
    if config.html_baseurl:
        config.ogp_site_url = config.html_baseurl.rstrip("/") + "/"
    elif name and address.netloc == "github.com":
        config.ogp_site_url = f"https://{owner}.github.io/{name}/"
    if address.netloc != "github.com":
        for button in [option for option in options if option.startswith(("repository_", "use_", "launch_"))]:
            del options[button]


def setup(app: Any) -> dict[str, bool]:
    """Describe pictures while an output still has all its formats, which is before any page is written."""
    app.connect("doctree-read", describe_pictures)
    app.connect("doctree-read", mark_long_code)
    app.connect("html-page-context", describe_page, priority=400)  # before OpenGraph looks for a description
    app.connect("html-page-context", open_alike, priority=600)  # after the theme has made its buttons
    app.connect("config-inited", set_address)
    app.connect("build-finished", write_root_page, priority=400)  # before sphinx-external-toc looks for one
    return {"parallel_read_safe": True, "parallel_write_safe": True}
