# Inputs, params and priorities of the rules about text, and of the residual's A/B; no rules.


def texted(variant):
    """Input function: the variant's text, if it was judged and passed, and this project's own model runs it."""

    def files(wildcards):
        if not (judged(variant)(wildcards) and has_text(variant)) or status(variant) != "pass":
            return []
        return [f"{RESULTS}/text/{variant}.parquet", f"{RESULTS}/text/{variant}.json"]

    return files


def attributed(variant):
    """Input function: which ops moved the variant's text, if it has one."""
    return lambda wildcards: (
        [f"{RESULTS}/text/attribution/{variant}.json"] if texted(variant)(wildcards) else []
    )


def text_of_parent(wildcards):
    """The parent's text; nothing at the bottom of the ladder, or above an engine or a commit."""
    parent = CONFIG.ladder[wildcards.variant].parent
    if not (parent and has_text(parent)):
        return []
    return [f"{RESULTS}/text/{parent}.parquet", f"{RESULTS}/text/{parent}.json"]


def has_text(variant):
    """Whether a text of this variant can be run: not on an engine or a commit, nor without a prompt for it."""
    rung = CONFIG.ladder[variant]
    return bool(TEXTS) and rung.engine is None and rung.commit is None


def same_bits(wildcards):
    """The parent's text, to be copied where the verdict says that both have the same bits; else nothing."""
    parent = CONFIG.ladder[wildcards.variant].parent
    against = verdict(wildcards.variant).get("vs_parent") or {}
    if not (parent and has_text(parent) and against.get("bit_equal")):
        return []
    return [f"{RESULTS}/text/{parent}.parquet", f"{RESULTS}/text/{parent}.json"]


def forced_only(wildcards):
    """Option: leaves have no text of their own, but those on the residual, whose question is when repetition sets in."""
    rung = CONFIG.ladder[wildcards.variant]
    return "" if rung.spine or "residual" in rung.change else "--forced-only"


def after_spine(wildcards):
    """Priority: verdicts of the spine first, for others wait for them; a leaf's text is short and can come last."""
    return 5 if forced_only(wildcards) == "" else 0


def text_prompts(wildcards):
    """Prompts that are continued, as one value, so that a changed one reruns texts and nothing else."""
    found = [prompt for prompt in load_prompts(CONFIG.prompts) if prompt.has_text]
    return json.dumps([[prompt.id, prompt.kind, prompt.text, prompt.turns] for prompt in found])


def reference_texts(wildcards):
    """The reference's own texts; nothing where no prompt is continued."""
    return expand("<results>/text/trained.h5") if TEXTS else []


def texts_of_spine(wildcards):
    """Texts of the spine's rungs that this call judges and that passed."""
    return [file for rung in CONFIG.ladder.spine() for file in texted(rung.id)(wildcards)]


def texts_of_residuals(wildcards):
    """Texts of the residual's A/B; that of what it stands on is among the spine's."""
    return [file for variant in RESIDUALS for file in texted(variant)(wildcards)]


def about_residual(wildcards):
    """What the residual's A/B says, where the call is about it or about the whole ladder."""
    about = target() in (None, B5, *RESIDUALS)
    return expand("<results>/residual.json") if RESIDUALS and about else []
