"""SVG pictures as elements of a page: no file header, unique ids, and the page's colors."""

import re

from loong.workloads.plots.style import INK, PAPER

_ATTRIBUTE = re.compile(r'="[^"]*"')
_NUMBER = re.compile(r"(\d+\.\d{2})\d+")
_NAME = re.compile(r'(\bid="|url\(#|href="#)')


def inline_svg(svg: str, name: str, words: str) -> str:
    """Return the element, with `name` before all its ids; `words` describe it for screen readers."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r"<!--.*?-->", "", element, flags=re.DOTALL)
    element = _ATTRIBUTE.sub(lambda value: _NUMBER.sub(r"\1", value[0]), element)  # what is drawn, no words
    element = _NAME.sub(rf"\g<1>{name}-", element)
    element = (
        element.replace(f"fill: {PAPER}", "fill: none")
        .replace(INK, "currentColor")
        .replace("xlink:href", "href")
    )
    head, rest = element.split(">", 1)
    view = re.search(r'viewBox="[^"]*"', head)
    assert view is not None  # matplotlib writes one
    label = words.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view[0]} role="img" aria-label="{label}">{rest}'
