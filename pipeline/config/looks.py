"""Defines the style of all figures, and the colour and dashes of each model's line."""

from collections.abc import Iterable
from dataclasses import dataclass

INK, GRID, PAGE = "#1a1a1a", "#d0d0cf", "#fffffe"
# Colour-blind readers can distinguish the colours of this palette: seven are from Okabe and Ito (2008), with INK in place of
# black, and four from Tol (2021).
PALETTE = ("#0072b2", "#56b4e9", INK, "#e69f00", "#d55e00", "#009e73", "#cc79a7", "#882255", "#999933", "#332288", "#aa4499")
DASH_PATTERNS = ((), (5, 2), (10, 2), (5, 2, 1, 2), (1.5, 1.5), (9, 2, 1, 2, 1, 2))  # 6 patterns × 11 colours = 66 looks
# A colour in a figure → a CSS value that follows the page's light or dark scheme
ON_PAGE = {INK: "currentColor", GRID: "var(--rule)", PAGE: "var(--page)", "#ffffff": "none"}
LEAST_LUMINANCE = 0.2  # minimum luminance on the dark page; 0.2 gives a contrast ratio of 4; WCAG 2.2 (1.4.11) requires 3
# The models of osa.MODELS. The position of a model here determines its look.
FIXED: tuple[str, ...] = ("osa_qr", "osa_ns", "vit", "vit_noskip", "vit_noskip_nonorm", "osa_exact")
FIXED += ("osa_qr_literal", "osa_shaped", "espa", "vskipinit", "softmax_shaped", "uspa", "softmax_shaped_norm", "osa_cayley")
FIXED += ("uspa_causal", "espa_causal", "espa_skip", "softmax_skip", "softmax_skip_nonorm", "osa_iso", "softmax_iso")
FIXED += ("espa_iso", "uspa_iso", "vskipinit_iso", "vit_section_4", "osa_xavier", "vit_noskip_ji", "vit_noskip_ji_nonorm")
LOOK_OF_METHOD = {  # attention method → model with the same look
    "qr": "osa_qr",
    "newton_schulz": "osa_ns",
    "exact": "osa_exact",
    "softmax": "vit",
    "qr_literal": "osa_qr_literal",
    "cayley": "osa_cayley",
}
METHOD_LABELS = {
    "qr": "QR",
    "newton_schulz": "Newton–Schulz",
    "exact": "exact",
    "softmax": "softmax",
    "qr_literal": "literal QR",
    "polar_express": "Polar Express",
    "cayley": "Cayley",
}
LINE_WIDTH = 1.6
STYLE = {
    "svg.hashsalt": "figure_1",  # gives the elements of an SVG the same ids in every run
    "svg.fonttype": "none",  # keeps letters as text instead of outlines, so that searches and screen readers find them
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib, so all machines lay out figures alike
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


@dataclass(frozen=True)
class Look:
    """The colour and the dashes of a model's line. Dashes are in units of the line width."""

    colour: str
    dashes: tuple[float, ...]

    def line(self, **changes) -> dict:
        """Keyword arguments for matplotlib's `plot`. `changes` override them."""
        dashes = (0, self.dashes) if self.dashes else "-"
        return {"color": self.colour, "linestyle": dashes, "linewidth": LINE_WIDTH} | changes


def look_of(name: str, among: Iterable[str] = ()) -> Look:
    """Returns the look of a model or attention method. Models outside FIXED get the remaining looks, in `among`'s order."""
    name = LOOK_OF_METHOD.get(name, name)
    own = [other for other in dict.fromkeys((*among, name)) if other not in FIXED]
    place = FIXED.index(name) if name in FIXED else len(FIXED) + own.index(name)
    return Look(PALETTE[place % len(PALETTE)], DASH_PATTERNS[place % len(DASH_PATTERNS)])


def on_page(colour: str) -> str:
    """Returns a colour as CSS. In the dark scheme, a colour that is too dark is mixed with white."""
    if colour in ON_PAGE:
        return ON_PAGE[colour]
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    if luminance >= LEAST_LUMINANCE:
        return colour
    share = 0.65 * (1 - luminance / LEAST_LUMINANCE)
    return f"light-dark({colour}, color-mix(in srgb, {colour}, #fff {share:.0%}))"
