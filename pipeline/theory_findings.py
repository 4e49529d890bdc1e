"""What the theory stage's tables say about each theorem: the numbers that decide, the rule, and the verdict.

A finding is supported if every measure that has a limit is on its side of it. Each number is taken from a table as its
file has it.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.stats import linregress, t

from osa.theory import rounding
from pipeline.findings import measure, verdict
from pipeline.params import Params

FOLDER = Path("paper_outputs/theory")
METHOD_LABELS = {"qr": "QR", "newton_schulz": "Newton–Schulz", "exact": "exact"}
EXACT = ("qr", "exact")


def findings(params: Params, tables: dict[str, pd.DataFrame]) -> list[dict]:
    """Every finding, in the order of the paper."""
    makers = (theorem_2_1, theorem_2_2, theorem_3_1, theorem_4_1, theorem_4_2, theorems_4_3_4_4, trainability)
    return [maker(params, tables) for maker in makers]


def measure_table(found: list[dict]) -> pd.DataFrame:
    """All measures below one another, each with the finding that it belongs to."""
    return pd.DataFrame({"finding": finding["id"]} | measure for finding in found for measure in finding["measures"])


def _finding(identifier: str, sources: list[str], measures: list[dict], **texts) -> dict:
    files = [*sources, "measures"]
    return {
        "id": identifier,
        "verdict": verdict(measures),
        "measures": measures,
        "figure": f"{identifier}.svg",
        "sources": [f"{FOLDER}/{name}.csv" for name in files],
    } | texts


def _table(columns: list[str], rows: list[list[str]]) -> dict:
    return {"columns": columns, "align": "l" + "r" * (len(columns) - 1), "rows": rows}


def _number(value: float) -> str:
    """Three significant digits, as in 0.0123, 12.3 and 1.23 × 10⁻⁷."""
    if not np.isfinite(value):
        return "∞"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa} × 10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def shown_state(table: pd.DataFrame) -> str:
    """The state of the layers that a figure shows: trained, or initialised where no weights are there."""
    return "trained" if (table["state"] == "trained").any() else "initialised"


def _layer_names(params: Params, table: pd.DataFrame) -> str:
    """Which layers were measured, and the models whose weights are missing."""
    layers = table[table["state"].notna()]
    trained = set(layers.loc[layers["state"] == "trained", "source"])
    missing = [params.label(name) for name in dict.fromkeys(layers["source"]) if name not in trained]
    return f"Not trained yet, and measured as initialised alone: {', '.join(missing)}." if missing else ""


def _joined(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def theorem_2_1(params: Params, tables: dict[str, pd.DataFrame]) -> dict:
    table, settings = tables["theorem_2_1"], params.theory.theorem_2_1
    exact = table[table["dtype"] == "float64"]
    layers = table[(table["sweep"] == "layer") & (table["state"] == shown_state(table))]
    measures, rows = [], []
    for method in METHOD_LABELS:
        own = exact[exact["method"] == method]
        if method in EXACT:
            note = f"the largest of {len(own)} cases; its error is at most {_number(own['error'].max())}"
            ratio = (own["error"] / own["tolerance"]).max()
            what = f"{METHOD_LABELS[method]}, float64: error over what rounding allows"
            measures.append(measure(what, ratio, "", "below", 1.0, note))
        single = layers[(layers["method"] == method) & (layers["dtype"] == "float32")]
        if len(single):
            what = f"{METHOD_LABELS[method]}, float32: largest error in the {shown_state(table)} layers"
            measures.append(measure(what, single["error"].max()))
        for dtype in ("float32", "float64"):
            own = table[(table["method"] == method) & (table["dtype"] == dtype)]
            at = [own[(own["sweep"] == "norm") & (own["value"] == norm)]["error"].max() for norm in _ends(settings.norms)]
            at += [own[own["sweep"] == "condition"]["error"].max(), own[own["sweep"] == "layer"]["error"].max()]
            rows.append([f"{METHOD_LABELS[method]}, {dtype}", *map(_number, at)])
    columns = ["Largest error", *(f"‖S‖₂ = {norm:g}" for norm in _ends(settings.norms)), "any cond(M)", "layers"]
    return _finding(
        "theorem_2_1", ["theorem_2_1"], measures,
        title="The low-rank exponential is the dense one",
        place="Theorem 2.1",
        statement="exp(S) = I + B (exp[S] − I) Bᵀ with [S] = BᵀSB, for an orthonormal basis B of span[Q, K]",
        rule=f"In float64 the error ‖A − exp(S)‖₂ of QR and of exact is in every case at most {params.theory.products} "
        "· n · eps · (1 + μ), squared brackets for exact, where n = max(N, 2d_v) and μ = α/√d_v · ‖M‖₂².",
        remark=_joined(
            "The theorem needs an orthonormal basis of span[Q, K], which Newton–Schulz has not reached when it stops: "
            "its A is not exp(S) but something near it, by an error that is the same in both precisions and grows with "
            "‖S‖₂.",
            _layer_names(params, table),
        ),
        caption="Error of A against the dense float64 exponential, over ‖S‖₂ and over the condition of M. Lines: "
        "median over Gaussian sizes and seeds. Points: heads of the models' layers. Dashed: what rounding allows QR.",
        table=_table(columns, rows),
    )  # fmt: skip


def _ends(values: list[float]) -> list[float]:
    """The first, the one nearest to 1, and the last."""
    return list(dict.fromkeys([values[0], min(values, key=lambda v: abs(np.log(v))), values[-1]]))


def theorem_2_2(params: Params, tables: dict[str, pd.DataFrame]) -> dict:
    table, settings = tables["theorem_2_2"], params.theory.theorem_2_2
    deepest = settings.depths[-1]
    measures, rows = [], []
    for stack in dict.fromkeys(table["stack"]):
        own = table[table["stack"] == stack]
        method, last = stack.split(",")[0], own[own["depth"] == deepest]
        if method in EXACT:
            what = f"{stack_label(stack)}: largest relative change of an eigenvalue"
            note = f"tokens of {own.groupby(['tokens', 'seed']).ngroups} inputs, depth up to {deepest}"
            measures.append(measure(what, own["change"].max(), "", "below", settings.tolerance, note))
        elif method == "newton_schulz":
            measures.append(measure(f"{stack_label(stack)}: largest relative change of an eigenvalue", own["change"].max()))
        else:
            what = f"{stack_label(stack)}: largest effective rank at depth {deepest}"
            measures.append(measure(what, last["effective_rank"].max()))
        ranks = []
        for tokens in dict.fromkeys(table["tokens"]):
            mean = own[own["tokens"] == tokens].groupby("depth")["effective_rank"].mean()
            ranks.append(f"{mean[0]:.2f} → {mean[deepest]:.2f}")
        rows.append([stack_label(stack), *ranks, _number(own["change"].max())])
    names = {"gaussian": "Gaussian tokens", "mnist": "MNIST tokens"}
    columns = [
        "Attention",
        *(f"Effective rank, {names[t]}" for t in dict.fromkeys(table["tokens"])),
        "Largest change of an eigenvalue",
    ]
    return _finding(
        "theorem_2_2", ["theorem_2_2", "theorem_2_2_spectra"], measures,
        title="Orthogonal attention keeps the spectrum that softmax loses",
        place="Theorem 2.2",
        statement="Σ_l = X_l X_lᵀ = A Σ₀ Aᵀ with A ∈ SO(N): rank and eigenvalues of Σ₀ are preserved at every depth",
        rule="In a stack of one-head layers without MLP, skip or norm, with W^V W^O orthogonal, every non-zero "
        f"eigenvalue of Σ_l is within a relative {settings.tolerance:g} of its value at depth 0, up to depth {deepest}, "
        "for QR and exact in float64.",
        remark="The proof takes every A to be orthogonal. Newton–Schulz with its finite number of iterations gives one that "
        "contracts some directions, so that its eigenvalues drift with depth; the theorem is one about QR and exact.",
        caption="Each line is an eigenvalue of the kernel matrix of one image's tokens, relative to the largest, "
        "through the layers of an attention-only stack. Orthogonal attention keeps them all; softmax attention sends "
        "all but one to zero.",
        table=_table(columns, rows),
    )  # fmt: skip


def stack_label(stack: str) -> str:
    """A stack's name as a reader sees it."""
    names = {"softmax": "Softmax, no skip", "softmax, skip": "Softmax with skip"}
    method, _, alpha = stack.partition(", alpha ")
    return names.get(stack) or f"OSA ({METHOD_LABELS[method]}), α = {alpha}"


def theorem_3_1(params: Params, tables: dict[str, pd.DataFrame]) -> dict:
    table = tables["theorem_3_1"]
    slack = table["tokens"].map(lambda n: rounding(n, torch.float64, params.theory.products))
    ratios = {bound: table["error"] / (table[bound] + slack) for bound in ("bound_10", "bound_11", "bound_general")}
    classical = table["iteration"] == "newton_schulz"
    state = shown_state(table)
    layers = table[classical & (table["state"] == state)]
    measures = []
    for bound, name in (("bound_10", "Eq. 10"), ("bound_11", "Eq. 11")):
        what, note = f"Newton–Schulz: measured over {name} + rounding", f"the largest of {classical.sum()} cases"
        measures.append(measure(what, ratios[bound][classical].max(), "", "below", 1.0, note))
    violated = ~classical & (ratios["bound_10"] > 1)
    above_one = (violated & (table["sigma_max"] > 1)).sum()
    note = f"of {(~classical).sum()}; {above_one} of them have a singular value of B above 1"
    measures.append(measure("Polar Express: cases above Eq. 10", violated.sum(), "cases", note=note))
    what = "Polar Express: measured over the bound with ‖B‖₂² ‖S‖₂ for ‖S‖₂, + rounding"
    measures.append(measure(what, ratios["bound_general"][~classical].max()))
    if len(layers):
        measures.append(measure(f"{state.capitalize()} layers: largest ‖YᵀY − I‖₂ by Newton–Schulz", layers["error"].max()))
        measures.append(measure(f"{state.capitalize()} layers: largest bound of Eq. 10", layers["bound_10"].max()))
    rows = []
    iterations = params.theory.theorem_3_1.iterations
    for condition in params.theory.theorem_3_1.conditions:
        cells = []
        for iteration in ("newton_schulz", "polar_express"):
            own = table[
                (table["source"] == "gaussian") & (table["iteration"] == iteration) & (table["condition"] == condition)
            ]
            cells += [_number(own[own["num_iterations"] == k]["error"].max()) for k in _iterations(iterations)]
        rows.append([f"{condition:g}", *cells])
    names = [f"{name}, K = {k}" for name in ("Newton–Schulz", "Polar Express") for k in _iterations(iterations)]
    return _finding(
        "theorem_3_1", ["theorem_3_1"], measures,
        title="The orthogonality error stays within its bounds",
        place="Theorem 3.1",
        statement="‖YᵀY − I‖₂ ≤ (e^‖S‖₂ − 1)² maxᵢ|σᵢ²(σᵢ² − 1)| ≤ ¼ (e^‖S‖₂ − 1)², σᵢ the singular values of B",
        rule="With Newton–Schulz, in every case, the measured error is at most either bound plus "
        f"{params.theory.products} · N · eps.",
        remark=_joined(
            "The proof uses σᵢ ≤ 1, which Newton–Schulz keeps and the statement does not say. Polar Express passes 1 "
            "before it converges: there both bounds can fail, and hold again with ‖B‖₂² ‖S‖₂ in place of ‖S‖₂ in Eq. "
            "10.",
            _layer_names(params, table),
        ),
        caption="Left: ‖YᵀY − I‖₂ against the number of iterations at the largest ‖S‖₂, a colour per condition of M; "
        "dashed, Eq. 11. Right: measured against Eq. 10, for every case; above the dashed diagonal the bound fails. "
        "Bounds beyond the axis stand at its end.",
        table=_table(["cond(M), largest error", *names], rows),
    )  # fmt: skip


def _iterations(last: int) -> list[int]:
    return sorted({min(6, last), last})


def theorem_4_1(params: Params, tables: dict[str, pd.DataFrame]) -> dict:
    table = tables["theorem_4_1"]
    measures, rows = [], []
    for method, own in table.groupby("method", sort=False):
        ratio = (own["error"] / own["tolerance"]).max()
        note = f"the largest of {len(own)} cases; the relative error is at most {_number(own['error'].max())}"
        what = f"{METHOD_LABELS[method]}: relative error over what rounding allows"
        measures.append(measure(what, ratio, "", "below", 1.0, note))
        norms = [f"{_number(own[c].min())} to {_number(own[c].max())}" for c in ("first_norm", "second_norm")]
        rows.append([METHOD_LABELS[method], *norms, _number(own["error"].max())])
    return _finding(
        "theorem_4_1", ["theorem_4_1"], measures,
        title="The Jacobian is J₁ + J₂",
        place="Theorem 4.1",
        statement="J = ∂vec OSA(X)/∂vec X = (X W^V W^O ⊗ I)ᵀ ∂vec A/∂vec X + (W^V W^O)ᵀ ⊗ A = J₁ + J₂",
        rule="In float64 and in every case, J from automatic differentiation differs from J₁ + J₂ by at most "
        f"{params.theory.products} · max(N, d) · eps · cond(M), relative to ‖J‖_F.",
        remark="For QR and exact ∂A is the exponential's derivative in closed form, so that automatic differentiation "
        "is checked too; for Newton–Schulz, whose A is not exp(S), it is differentiated automatically by itself.",
        caption="Relative difference between J and J₁ + J₂, for each method, size and seed; dashed, what rounding allows.",
        table=_table(["Method", "‖J₁‖₂", "‖J₂‖₂", "Largest relative error"], rows),
    )  # fmt: skip


def theorem_4_2(params: Params, tables: dict[str, pd.DataFrame]) -> dict:
    table = tables["theorem_4_2"]
    measures, rows = [], []
    ours = table[table["source"] == "Section 4"]
    exact = table[(table["source"] != "Section 4") | (table["dtype"] == "float64")]
    for dtype, own in ours.groupby("dtype", sort=False):
        tolerance = own["embed_dim"].map(lambda d, dtype=dtype: rounding(d, getattr(torch, dtype), params.theory.products))
        note = f"the largest of {len(own)} heads; |σ − 1| is at most {_number(own['deviation'].max())}"
        what = f"{dtype}: |σ − 1| over what rounding allows"
        measures.append(measure(what, (own["deviation"] / tolerance).max(), "", "below", 1.0, note))
    for source, state, own in _weight_groups(exact):
        name = {"Section 4": "Section 4, as initialised", "Xavier": "Xavier, as initialised"}.get(source)
        name = name or f"{params.label(source)}, {state}"
        values = [own["sigma_min"].min(), own["sigma_max"].max(), own["kappa"].median(), own["kappa"].max()]
        rows.append([name, str(len(own)), *map(_number, values)])
        if source == "Xavier" or state == "trained":
            measures.append(measure(f"{name}: median κ(W̃)", own["kappa"].median()))
    return _finding(
        "theorem_4_2", ["theorem_4_2"], measures,
        title="The query–key product starts with condition 1",
        place="Theorem 4.2",
        statement="If [W^Q, W^K] is orthonormal, all non-zero singular values of W̃ = W^Q W^Kᵀ − W^K W^Qᵀ are 1: κ(W̃) = 1",
        rule="For every head initialised by Section 4, each of the 2d_v singular values of W̃ is within "
        f"{params.theory.products} · d · eps of 1, in float64 and in float32.",
        remark=_joined(
            "W̃ has rank 2d_v, so that these are all of its singular values that are not zero.",
            "Training moves them away from 1." if shown_state(table) == "trained" else "",
            _layer_names(params, table),
        ),
        caption="The 2d_v largest singular values of W̃ for each head, over their rank in percent: Section 4's "
        "initialisation, Xavier's, and the models' layers.",
        table=_table(["Weights", "Heads", "Smallest σ", "Largest σ", "Median κ", "Largest κ"], rows),
    )  # fmt: skip


def _weight_groups(table: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """The heads by where they come from."""
    for (source, state), own in table.groupby(["source", table["state"].astype(object).fillna("")], sort=False):
        if state != "initialised":  # which is Section 4 again
            yield source, state, own


def theorems_4_3_4_4(params: Params, tables: dict[str, pd.DataFrame]) -> dict:
    table, layers, settings = tables["theorems_4_3_4_4"], tables["theorems_4_3_4_4_layers"], params.theory.theorems_4_3_4_4
    measures = []
    for method, own in table.groupby("method", sort=False):
        name = METHOD_LABELS[method]
        value, low, high = slope(own[own["alpha"] <= settings.fit_below], settings.confidence)
        note = f"slope {value:.5f}, {settings.confidence:.0%} interval {low:.5f} to {high:.5f}"
        what = f"{name}: |slope − 1| of ‖J₁‖₂ against α"
        measures.append(measure(what, abs(value - 1), "", "below", settings.slope_tolerance, note))
        bounded = own[np.isfinite(own["bound_excess"])]
        note = f"the largest of the {len(bounded)} of {len(own)} cases in which δ + ‖J₁‖₂ < 1"
        what = f"{name}: κ(J) − 1 over that of the bound"
        measures.append(measure(what, (bounded["excess"] / bounded["bound_excess"]).max(), "", "below", 1.0, note))
        if method in EXACT:
            ratio = (own["first_norm"] / (own["constant"] * own["alpha"])).max()
            measures.append(measure(f"{name}: ‖J₁‖₂ over Cα with C = 2‖X‖₂²/√d_v", ratio, "", "below", 1.0, "for every α"))
    rows = []
    if len(layers):
        before = layers[layers["state"] == "initialised"]
        measures.append(measure("One head of a model's layer as initialised: largest κ(J)", before["kappa"].max()))
        after = layers[layers["state"] == "trained"]
        if len(after):
            measures.append(measure("One head of a trained layer: largest κ(J)", after["kappa"].max()))
        note = f"largest {_number(before['kappa_sum'].max())}; 1 for each head by itself"
        what = "All heads of a layer as initialised: median κ of Σᵢ W^Vᵢ W^Oᵢ"
        measures.append(measure(what, before["kappa_sum"].median(), note=note))
        rows = _layer_rows(layers)
    sources = list(dict.fromkeys(layers["source"])) if len(layers) else []
    columns = ["Layer", *(f"{column}, {params.label(s)}" for s in sources for column in ("α", "κ(J)"))]
    return _finding(
        "theorems_4_3_4_4", ["theorems_4_3_4_4", "theorems_4_3_4_4_layers"], measures,
        title="A small α keeps one head's Jacobian well-conditioned",
        place="Theorems 4.3 and 4.4, Remark 4.5",
        statement="‖J₁‖₂ ≤ Cα, and therefore 1 ≤ κ(J) ≤ (1 + δ + Cα)/(1 − δ − Cα) where |σᵢ(A) − 1| ≤ δ",
        rule=f"For α ≤ {settings.fit_below:g} the log–log slope of ‖J₁‖₂ against α is within "
        f"{settings.slope_tolerance:g} of 1; for every α κ(J) is at most the bound with the measured ‖J₁‖₂ and δ, and "
        "for QR and exact ‖J₁‖₂ at most 2‖X‖₂²α/√d_v.",
        remark=_joined(
            "QR, for which the paper has no proof, behaves as the others: exp(S) does not depend on the basis, so that "
            "C = 2‖X‖₂²/√d_v needs no assumption on M. The theorems are about one head: a layer of h heads adds W^V "
            "W^O that are drawn independently, and the condition number of that sum, which the theorems leave out, is "
            "far from 1.",
            _layer_names(params, layers) if len(layers) else "",
        ),
        caption="Left: ‖J₁‖₂ against α on Gaussian tokens; dashed, Cα. Middle: κ(J); dashed, the bound of Theorem 4.4 "
        "with measured δ and ‖J₁‖₂. Right: κ(J) of a head of each layer, before (open) and after training (filled).",
        table=_table(columns, rows) if rows else None,
    )  # fmt: skip


def slope(points: pd.DataFrame, confidence: float) -> tuple[float, float, float]:
    """Slope of log ‖J₁‖₂ against log α with its interval; every size and seed has a level of its own."""
    level = points.groupby(["tokens", "embed_dim", "num_heads", "seed"])["first_norm"].transform(lambda v: np.log(v).mean())
    fit = linregress(np.log(points["alpha"]), np.log(points["first_norm"]) - level)
    half = t.ppf((1 + confidence) / 2, len(points) - 2) * fit.stderr
    return fit.slope, fit.slope - half, fit.slope + half


def _layer_rows(layers: pd.DataFrame) -> list[list[str]]:
    """A row for each layer: α, mean over its heads, and median κ(J), before → after training, of every model."""
    rows = []
    for number, own in layers.groupby("layer"):
        cells = []
        for _, model in own.groupby("source", sort=False):
            for column in ("alpha_mean", "kappa"):
                values = model.groupby("state", sort=False)[column].median()
                cells.append(" → ".join(_number(values[state]) for state in ("initialised", "trained") if state in values))
        rows.append([str(number), *cells])
    return rows


def trainability(params: Params, tables: dict[str, pd.DataFrame]) -> dict:
    table, settings = tables["trainability"], params.theory.trainability
    depths = [settings.depths[0], settings.depths[-1]]
    orthogonal = [name for name in settings.models if params.variants[name].attention == "orthogonal"]
    gains = {name: _gains(table[table["model"] == name]) for name in settings.models}
    deep = table[table["depth"] == depths[1]].groupby("model")
    kappa = np.exp(deep["logits_kappa"].apply(lambda v: np.log(v).mean()))
    base, base_name = gains[settings.baseline], params.label(settings.baseline)
    measures = []
    for name in orthogonal:
        own, text = gains[name], params.label(name)
        factor = max(own["attention_gain"], 1 / own["attention_gain"])
        note = f"‖J‖_F/√(Nd) changes by the factor {own['attention_gain']:.3f} a block"
        measures.append(measure(f"{text}, attention alone: factor a block", factor, "", "below", settings.gain_factor, note))
        what = f"{text}, attention alone at depth {depths[1]}: ‖J‖₂ over its root mean square singular value"
        measures.append(
            measure(
                what, (deep["attention_spectral"].mean() / deep["attention_gain"].mean())[name], note="1 for an isometry"
            )
        )
        ratio = own["logits_frobenius"] / base["logits_frobenius"]
        note = f"{own['logits_frobenius']:.3f} a block, against {base['logits_frobenius']:.3f}"
        measures.append(measure(f"{text}: ‖∂logits/∂X₀‖_F kept a block, over {base_name}", ratio, "", "above", 1.0, note))
        note = f"{_number(kappa[name])} against {_number(kappa[settings.baseline])}"
        what = f"{text}: κ(∂logits/∂X₀) at depth {depths[1]}, over {base_name}"
        measures.append(measure(what, kappa[name] / kappa[settings.baseline], "", "below", 1.0, note))
    rows = []
    for name in settings.models:
        own = table[table["model"] == name].groupby("depth")
        cells = [f"{gains[name][c]:.3f}" for c in ("attention_gain", "logits_frobenius")]
        for column in ("logits_kappa", "first_gradient"):
            mean = np.exp(own[column].apply(lambda v: np.log(v).mean()))
            cells += [_number(mean[depth]) for depth in depths]
        rows.append([params.label(name), *cells])
    columns = ["Model", "Attention’s factor a block", "Network’s factor a block"]
    columns += [f"{what}, depth {depth}" for what in ("κ(∂logits/∂X₀)", "Gradient of block 1") for depth in depths]
    return _finding(
        "trainability", ["trainability"], measures,
        title="What reaches the first block of a deep network",
        place="Abstract and Section 4",
        statement="OSA allows Transformers without skip connections and normalisation layers to be more easily trained",
        rule="At initialisation, for each of the paper’s OSA models: the attention layers alone change ‖J‖_F by a "
        f"factor of at most {settings.gain_factor:g} a block, and ∂logits/∂X₀ of the whole network shrinks less a "
        f"block, and at depth {depths[1]} has a smaller condition number, than that of {base_name}.",
        remark=_gain_remark(params, gains, orthogonal),
        caption="At initialisation, over depth: ‖∂logits/∂X₀‖_F, its condition number, and the norm of the loss’s "
        "gradient in the first block. Mean over seeds on a logarithmic scale.",
        table=_table(columns, rows),
    )  # fmt: skip


def _gains(own: pd.DataFrame) -> dict[str, float]:
    """The factor a block, from the slope of the logarithm over depth."""
    columns = ("attention_gain", "logits_frobenius", "first_gradient")
    return {column: float(np.exp(linregress(own["depth"], np.log(own[column])).slope)) for column in columns}


def _gain_remark(params: Params, gains: dict[str, dict], orthogonal: list[str]) -> str:
    """Which networks keep the norm of the logits' Jacobian, and why those of OSA do not if they do not."""
    least = 1 / params.theory.trainability.gain_factor
    keeping = [name for name in gains if gains[name]["logits_frobenius"] >= least]
    names = ", ".join(params.label(name) for name in keeping) or "no model"
    sentence = f"To within a factor {params.theory.trainability.gain_factor:g} a block, ‖∂logits/∂X₀‖_F is kept by {names}."
    if set(orthogonal) <= set(keeping):
        return sentence
    return _joined(
        sentence,
        "OSA’s MLPs lose it where its attention does not: GELU halves small signals, and without layer norm or skips "
        "nothing undoes that, so that OSA’s gradients fall exponentially with depth.",
    )
