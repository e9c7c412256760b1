"""Samples as one HTML page that needs nothing else, and runs nothing."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment, StrictUndefined

from eagle3.data.show.pieces import ShownSample
from eagle3.data.show.printable import printable
from eagle3.data.show.terminal import CONTINUES, visible

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ samples | length }} samples</title>
<style>
:root { color-scheme: light dark; --shade: #8883; --said: #3a37; --said2: #3a34; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; }
.tokens { font-family: ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.tokens span:nth-child(even) { background: var(--shade); }
.tokens .s { background: var(--said); }
.tokens .s:nth-child(even) { background: var(--said2); }
small { color: GrayText; }
</style>
</head>
<body>
<h1>Samples</h1>
<p>A shade for each token; <span class="tokens"><span class="s">supervised</span></span> ones are green. Point at
a token for its place and id. <code>{{ continues }}</code> ends a character that began in the token before.</p>
{% for sample in samples %}
<h2>{{ sample.id | printable }}</h2>
<p><small>{{ sample.counts }}</small></p>
<p class="tokens">
{%- for piece in sample.pieces -%}
<span{% if piece.supervised %} class="s"{% endif %} title="{{ loop.index0 }}: id {{ piece.token }}
{%- if piece.supervised %}, supervised{% endif %}">{{ piece | visible }}</span>
{%- endfor -%}
</p>
{% endfor %}
<h2>All</h2>
<pre>{{ about | printable }}</pre>
</body>
</html>
"""


def samples_page(samples: Sequence[ShownSample], about: str) -> str:
    """The page's text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters.update(visible=visible, printable=printable)
    return environment.from_string(_PAGE).render(samples=samples, about=about, continues=CONTINUES)
