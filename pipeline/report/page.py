"""Renders templates to GitHub's Markdown, and Markdown to HTML."""

import functools
import html
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import jinja2
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup, escape

from pipeline.config import params
from pipeline.core.files import rounded
from pipeline.report import numbers
from pipeline.statistics.verdicts import CONTRADICTED, REPRODUCED, Verdict

TEMPLATES = Path(__file__).parent / "templates"
# The word for a verdict or for a check's result → CSS class and mark of the word's badge
MARKS = {
    **dict.fromkeys((REPRODUCED, "confirmed", "holds"), ("good", "✓")),
    **dict.fromkeys((CONTRADICTED, "not confirmed", "fails"), ("bad", "✗")),
}
TOGETHER = re.compile(r"(?<=\d) (?=[±×])|(?<=[±×]) (?=[\d−])")  # spaces at which a line must not break
SPECIAL = re.compile(r"([\\`*_\[\]|~])")  # characters with a meaning in Markdown


def to_json(value: Any) -> Any:
    """Converts a value to the types of JSON. Rounds floats. NaN and infinities become None."""
    if isinstance(value, Verdict):
        return to_json(asdict(value) | {"here": value.here, "bound": value.bound})
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if hasattr(value, "item"):  # a NumPy scalar
        return to_json(value.item())
    if isinstance(value, float):
        return rounded(value) + 0.0 if math.isfinite(value) else None
    return value


def template_environment(label: Callable[[str], str]) -> jinja2.Environment:
    """Returns the Jinja environment of the templates. `label` maps a variant to its label."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = "fixed signed grouped percent mean_sd interval number times words span ranges listing"
    templates.filters |= {name: getattr(numbers, name) for name in names.split()}
    templates.filters |= {
        "plain": params.as_yaml,
        "verdict": lambda verdict, word="word": badge(verdict[word]),
        "holds": lambda check: badge("holds" if check["holds"] else "fails"),
        "label": lambda name: text(label(name)),
        "by": by,
    }
    return templates


def by(rows: Iterable[Mapping[str, Any]], key: str) -> dict[str, Mapping[str, Any]]:
    """Indexes rows by their value for a key: `table_2 | by("variant")`."""
    return {row[key]: row for row in rows}


def text(words: str) -> Markup:
    """Escapes a user's text, such as a label, so that Markdown and HTML show it unchanged."""
    return Markup(SPECIAL.sub(r"\\\1", str(escape(words))))


def badge(word: str) -> Markup:
    kind, mark = MARKS.get(word, ("open", "?"))
    return Markup(f'<span class="verdict {kind}">{mark} {escape(word)}</span>')


@functools.cache
def _markdown() -> MarkdownIt:
    renderer = MarkdownIt("commonmark", {"html": True, "typographer": True}).enable(["table", "smartquotes"])
    renderer.add_render_rule("table_open", lambda *_: '<div class="wide" tabindex="0"><table>\n')
    renderer.add_render_rule("table_close", lambda *_: "</table>\n</div>\n")
    return renderer


def to_html(markdown: str, drawings: Mapping[str, str], source: Callable[[str], str]) -> tuple[str, list[tuple[str, str]]]:
    """Renders a page's Markdown as HTML. Also returns the page's sections, each as (anchor, title up to its first colon).

    A paragraph that is only an image becomes a figure. `drawings` maps the image's path to inline SVG, and `source` maps the
    path to the links at the end of the figure's caption.
    """
    tokens, sections = _markdown().parse(TOGETHER.sub("\u00a0", markdown)), []
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            title = tokens[i + 1].content
            token.attrSet("id", anchor(title))
            if token.tag == "h2":
                sections.append((anchor(title), re.sub(r"<[^>]+>|:.*", "", title)))
        elif token.type == "inline" and (image := _only_image(token)):
            contents = "", _figure(image, drawings, source), ""  # replaces three tokens: <p>, image, </p>
            tokens[i - 1 : i + 2] = [Token("html_block", "", 0, content=content) for content in contents]
    return _markdown().renderer.render(tokens, _markdown().options, {}), sections


def anchor(title: str) -> str:
    """Returns the id that GitHub gives to a heading."""
    return re.sub(r"[^\w -]", "", html.unescape(re.sub(r"<[^>]+>", "", title)).lower()).replace(" ", "-")


def _only_image(token: Token) -> Token | None:
    children = [child for child in token.children or [] if child.type != "softbreak"]
    return children[0] if len(children) == 1 and children[0].type == "image" else None


def _figure(image: Token, drawings: Mapping[str, str], source: Callable[[str], str]) -> str:
    path = str(image.attrs["src"])
    caption = _markdown().renderer.render(image.children or [], _markdown().options, {})
    drawing = drawings.get(path) or f'<img src="{html.escape(path)}" alt="{html.escape(image.content)}">'
    return (
        f'<figure id="{html.escape(Path(path).stem)}"><div class="wide" tabindex="0">{drawing}</div>'
        f"<figcaption>{caption} {source(path)}</figcaption></figure>\n"
    )
