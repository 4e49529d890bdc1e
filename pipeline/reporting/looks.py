"""One look for each model, the same wherever it is drawn, and the style that all figures share."""

from dataclasses import dataclass

# Okabe and Ito (2008): colours that colour-blind readers tell apart. Their black is the text's colour, light or dark.
INK, GRID = "#1a1a1a", "#d0d0cf"
PALETTE = ("#0072b2", "#56b4e9", INK, "#e69f00", "#d55e00", "#009e73", "#cc79a7")
DASHES = ((), (5, 2), (10, 2), (5, 2, 1, 2), (1.5, 1.5), (9, 2, 1, 2, 1, 2))  # by 7 colours: 42 looks
ON_PAGE = {INK: "currentColor", GRID: "var(--rule)", "#ffffff": "none"}  # what follows the page's light or dark scheme
MODELS = ("osa_qr", "osa_ns", "vit", "vit_noskip", "vit_noskip_nonorm", "osa_exact", "osa_qr_literal")
METHODS = {  # the model whose look a method of attention has where it is drawn by itself
    "qr": "osa_qr",
    "newton_schulz": "osa_ns",
    "exact": "osa_exact",
    "softmax": "vit",
    "qr_literal": "osa_qr_literal",
}
METHOD_LABELS = {
    "qr": "QR",
    "newton_schulz": "Newton–Schulz",
    "exact": "exact",
    "softmax": "softmax",
    "qr_literal": "literal QR",
    "polar_express": "Polar Express",
}
LINE_WIDTH = 1.6
STYLE = {
    "svg.hashsalt": "figure_1",  # element names that do not change from run to run
    "svg.fonttype": "none",  # text stays text: it can be searched, and read aloud
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
    """How a model is drawn; dashes in units of the line width, none for a solid line."""

    colour: str
    dashes: tuple[float, ...]

    @property
    def on_page(self) -> str:
        """The colour as a page writes it."""
        return ON_PAGE.get(self.colour, self.colour)

    def line(self, **changes) -> dict:
        """The arguments of matplotlib's plot."""
        dashes = (0, self.dashes) if self.dashes else "-"
        return {"color": self.colour, "linestyle": dashes, "linewidth": LINE_WIDTH} | changes


def look(name: str, among: tuple[str, ...] | list[str] = ()) -> Look:
    """The look of a model, or of a method of attention. A model of one's own has one by its place `among` the variants."""
    name = METHODS.get(name, name)
    names = [*MODELS, *(other for other in among if other not in MODELS), name]
    place = names.index(name)
    return Look(PALETTE[place % len(PALETTE)], DASHES[place % len(DASHES)])
