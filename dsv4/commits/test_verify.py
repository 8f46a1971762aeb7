"""Trailers that come out again pass, each forgery is refused by name, and noise is told from forgery."""

import pytest

from dsv4.commits import evidence, verify
from dsv4.commits.band import Band
from dsv4.commits.test_evidence import VERDICT, parsed
from dsv4.commits.verify import claims, compare, needs_none
from dsv4.config import ConfigError

FOUND = {
    "Audit-Variant": "P5",
    "Audit-Parent": "P4",
    "Audit-Verdict": "pass",
    "Audit-Fidelity": "within",
    "Audit-Cosine": "attn_out 0.999961889 0.999980455 1.000000000",
    "Audit-Cosine-Min": "0.999794205 layer 1, attn_out (one, token 127)",
    "Audit-Cosine-Mean": "0.999973843",
    "Audit-Time": "not measured on this device",
    "Audit-Taps": "315 of 508",
    "Audit-Device": "emulated on cpu, cpu (x86_64); torch 2.13.0, numpy 2.4.6, triton 3.6.0",
    "Audit-Reference": "checkpoint f9e7c37ab517bcac, prompts 0e5a2fa7f3604038, decode_steps 3",
    "Audit-Report": "sha256:" + "5" * 64,
}
ELSEWHERE = {"Audit-Device": "emulated on cpu, cpu (x86_64); torch 2.14.0, numpy 2.4.6, triton 3.6.0"}
ROW = "layer 0, attn_out (two, token 3)"
H200 = "kernels on NVIDIA H200, NVIDIA H200 (sm_90); torch 2.13.0, numpy 2.4.6, triton 3.6.0"
TIME = "0.900 of P4 (0.890 to 0.913), NVIDIA H200"
NOISE = Band(whole=2e-4, row=2e-3)


def checked(changes=(), found=(), *, noise=None, optional=False):
    """Problems of a message that says ``FOUND`` with changes, and how it was compared."""
    compared = comparison(changes, found, noise=noise, optional=optional)
    return compared.problems, compared.note


def comparison(changes=(), found=(), *, noise=None, optional=False):
    """A message that says ``FOUND`` with changes, compared."""
    said = [(key, value) for key, value in (FOUND | dict(changes)).items() if value is not None]

    def give():
        assert noise is not None, "compared with a band"
        return noise

    return compare(said, FOUND | dict(found), give, optional=optional)


def digits_of(key):
    """Every digit of a trailer's cosines, one changed."""
    text = FOUND[key]
    end = text.find(" layer") if key == "Audit-Cosine-Min" else len(text)
    for at in [at for at in range(end) if text[at].isdigit()]:
        yield text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]


def test_what_is_said_truly_is_no_problem():
    problems, note = checked()
    assert problems == []
    assert note == "every trailer comes out again, digit for digit"


@pytest.mark.parametrize("key", verify.COSINES)
def test_any_changed_digit_of_a_cosine_is_refused(key):
    forged = list(digits_of(key))
    assert len(forged) >= 10
    for text in forged:
        ((problem,), _) = checked({key: text})
        assert problem.key.startswith(key)
        assert problem.claimed in text
        assert problem.found in FOUND[key]
        assert problem.why == "every digit must come again on the same device and versions"
    (problem,) = checked({"Audit-Cosine": "attn_out 0.999961889 0.999980456 1.000000000"})[0]
    assert problem.text == (
        "Audit-Cosine, layer 1: claimed 0.999980456, found 0.999980455"
        " (every digit must come again on the same device and versions)"
    )


@pytest.mark.parametrize(
    ("key", "forged"),
    [
        ("Audit-Variant", "P4"),
        ("Audit-Parent", "none"),
        ("Audit-Verdict", "fail"),
        ("Audit-Fidelity", "bit_equal"),
        ("Audit-Culprit", "layer 0, q (q_b), limit"),
        ("Audit-Cosine", "moe_out 0.999961889 0.999980455 1.000000000"),
        ("Audit-Cosine", "attn_out 0.999961889 0.999980455"),
        ("Audit-Cosine-Min", "0.999794205 layer 2, attn_out (one, token 127)"),
        ("Audit-Time", "0.5 of P4, NVIDIA H200"),
        ("Audit-Taps", "508 of 508"),
        ("Audit-Reference", FOUND["Audit-Reference"].replace("f9e7", "e9e7")),
        ("Audit-Report", "sha256:" + "4" + "5" * 63),
    ],
)
def test_every_other_forgery_is_refused_by_name(key, forged):
    (problem,) = checked({key: forged})[0]
    assert (problem.key, problem.claimed) == (key, forged)
    assert problem.found == FOUND.get(key)


@pytest.mark.parametrize("key", FOUND)
def test_a_missing_trailer_is_refused_where_one_is_needed(key):
    problems, _ = checked({key: None})
    assert [problem.text for problem in problems] == [f"{key} is missing, found {FOUND[key]}"]
    assert checked({key: None}, optional=True)[0] == []


def test_a_trailer_that_stands_twice_is_refused():
    said = [*FOUND.items(), ("Audit-Verdict", "fail")]
    compared = compare(said, FOUND, lambda: NOISE)
    assert compared.state == "refused"
    assert compared.problems[0].text == "Audit-Verdict: claimed pass and fail, found pass (it stands twice)"


def test_from_elsewhere_cosines_may_differ_by_the_noise_and_no_more():
    near = "attn_out 0.999961500 0.999980600 0.999999990"
    changes = ELSEWHERE | {"Audit-Report": "sha256:" + "6" * 64}
    problems, note = checked(
        changes | {"Audit-Cosine": near, "Audit-Cosine-Mean": "0.999973900"}, noise=NOISE
    )
    assert problems == []
    assert note == (
        f"cosines within the noise floor, for they were computed on {ELSEWHERE['Audit-Device']};"
        " not checked here: Audit-Device, Audit-Time, Audit-Report"
    )
    (problem,) = checked(
        changes | {"Audit-Cosine": "attn_out 0.999961889 0.999970000 1.000000000"}, noise=NOISE
    )[0]
    assert problem.text.startswith("Audit-Cosine, layer 1: claimed 0.999970000, found 0.999980455 (0.0014")
    assert "and the noise floor explains 0.0002" in problem.text
    for key, value in (("Audit-Cosine-Min", f"0.999000000 {ROW}"), ("Audit-Cosine-Mean", "0.999990000")):
        (problem,) = checked(changes | {key: value}, noise=NOISE)[0]
        assert problem.key == key
        assert "the noise floor explains" in problem.why
    (problem,) = checked(changes | {"Audit-Cosine-Mean": "nan"}, noise=NOISE)[0]
    assert problem.why == "no number that can be compared"
    for key, forged in (("Audit-Verdict", "fail"), ("Audit-Reference", "checkpoint 0")):
        assert [problem.key for problem in checked(changes | {key: forged}, noise=NOISE)[0]] == [key]


def test_kernels_are_compared_within_noise_and_keep_their_time():
    device = {"Audit-Device": H200}
    compared = comparison(device | {"Audit-Time": TIME}, found=device, noise=NOISE)
    assert compared.problems == []
    assert compared.state == "within noise"
    assert compared.note.endswith("; not checked here: Audit-Time, Audit-Report")
    none = {"Audit-Time": "no kernel for this plan (q_format bf16): too narrow; set `backend: ref`"}
    assert comparison(device | none, found=device, noise=NOISE).problems == []


FORGED = {
    "Audit-Device": "kernels on NVIDIA H200 of the vendor, eight of them; torch 9",
    "Audit-Time": "0.010 of P4",
    "Audit-Report": "sha256:forged",
    "Audit-Cosine": "attn_out 0.999961500 0.999980600 0.999999990",
    "Audit-Cosine-Mean": "0.9999739 as measured on 8 H200 by the vendor",
}


def test_another_device_in_the_message_does_not_turn_verification_off():
    """A CPU's result with a device, a time and a hash of nobody's: refused; in their form: not called reproduced."""
    compared = comparison(FORGED, noise=NOISE)
    assert compared.state == "refused"
    assert {problem.key for problem in compared.problems} == FORGED.keys() - {"Audit-Cosine"}
    well_formed = {"Audit-Device": H200, "Audit-Time": TIME, "Audit-Report": "sha256:" + "4" * 64}
    compared = comparison(FORGED | well_formed | {"Audit-Cosine-Mean": "0.999973900"}, noise=NOISE)
    assert compared.problems == []
    assert compared.state == "within noise"
    assert compared.note.endswith("; not checked here: Audit-Device, Audit-Time, Audit-Report")


@pytest.mark.parametrize(
    ("key", "forged", "why"),
    [
        ("Audit-Cosine", "attn_out 0.999961500 or more", "form"),
        ("Audit-Cosine", FOUND["Audit-Cosine"] + " in eight runs", "form"),
        ("Audit-Cosine-Min", f"0.999794205 {ROW} at most", "form"),
        ("Audit-Cosine-Min", "0.999794205", "form"),
        ("Audit-Cosine-Mean", "0.99997", "form"),
        ("Audit-Device", f"{H200} on eight nodes", "form"),
        ("Audit-Device", H200.replace("NVIDIA H200 (", "NVIDIA B200 ("), "form"),
        ("Audit-Report", "sha256:" + "5" * 63, "form"),
        ("Audit-Report", "sha256:" + "5" * 64 + " signed", "form"),
        ("Audit-Time", "0.900 of P4, NVIDIA H200", "form"),
        ("Audit-Time", TIME.replace("H200", "B200"), "Audit-Device names NVIDIA H200"),
    ],
)
def test_what_is_not_in_its_form_is_refused_wherever_it_was_computed(key, forged, why):
    (problem, *_) = checked({"Audit-Device": H200} | {key: forged}, noise=NOISE)[0]
    assert (problem.key, problem.claimed) == (key, forged)
    assert why in problem.why


@pytest.mark.parametrize("device", [ELSEWHERE["Audit-Device"], H200.replace("sm_90", "no GPU")])
def test_a_time_beside_a_device_that_is_no_gpu_is_refused(device):
    (problem,) = checked({"Audit-Device": device, "Audit-Time": TIME}, noise=NOISE)[0]
    assert (problem.key, problem.why) == ("Audit-Time", "only what runs on a GPU is timed")


def test_each_state_is_counted_apart():
    about = {"commit": "1" * 40, "subject": "One", "kind": "one_site"}
    found = [verify.Checked(**about, state=state) for state in ("within noise", "reproduced", "within noise")]
    assert verify.counted(found) == "3 commits: 1 reproduced, 2 within noise, 0 needs none, 0 refused"


def test_what_moves_no_number_needs_no_trailers():
    assert needs_none({"kind": "no_numerics"})
    assert needs_none({"kind": "merge", "sites": [], "status": "pass"})
    assert not needs_none({"kind": "merge", "sites": [{"stage": "q_b"}], "status": "pass"})
    assert not needs_none({"kind": "merge", "sites": [], "status": "fail"})
    for kind in ("one_site", "two_sites", "inherited", "does_not_run"):
        assert not needs_none({"kind": kind, "sites": [], "status": "pass"})


@pytest.mark.xdist_group("commits")
def test_a_branch_is_verified_and_a_forged_digit_refused(small, tmp_path, capsys):
    """Evidence of a judged commit, written into a branch: reproduced; a digit changed above it: refused."""
    from dsv4.commits.audit import verdict
    from dsv4.commits.conftest import Repository

    verdict(small.results, small.config, small.shas["good"])
    said = evidence.of_commit(small.results, small.config, small.shas["good"])
    repo = Repository(tmp_path / "repo")
    repo.git("pull", "--quiet", str(small.repository.folder), "base", "--tags")
    repo.git("pull", "--quiet", str(small.repository.folder), small.shas["good"])
    repo.git("commit", "--quiet", "--amend", "-m", "Router in FP32\n\n" + "\n".join(evidence.lines(said)))
    (repo.folder / "README.md").write_text("Words\n")
    repo.commit("Words", "\n".join(evidence.lines(said | {"Audit-Cosine-Mean": "0.999999998"})))
    (repo.folder / "README.md").write_text("More words\n")
    repo.commit("More words")
    (repo.folder / "README.md").write_text("Yet more words\n")
    repo.commit("Yet more words", "audit-verdict: fail")
    options = ["--config", str(small.config.path), "--results", str(small.results)]
    options += ["--base", "base", "--head", "main", "--repo", str(repo.folder)]
    assert verify.main(options) == 1
    text = capsys.readouterr().err
    assert "Router in FP32: reproduced: every trailer comes out again, digit for digit\n" in text
    assert "Words: refused\n  Audit-Cosine-Mean: claimed 0.999999998, found " in text
    assert "More words: needs none: it moves no number: proved" in text
    assert "Yet more words: refused\n  Audit-Verdict: claimed fail, found pass\n" in text
    assert text.endswith("4 commits: 1 reproduced, 0 within noise, 1 needs none, 2 refused\n")
    assert not (small.results / verify.FRESH).exists()


@pytest.mark.xdist_group("commits")
def test_a_commit_with_a_rungs_evidence_reproduces(small):
    """The hook writes what the audit found of a rung; verification runs the commit: the same in every trailer."""
    from dsv4.commits.audit import verdict
    from dsv4.judge.gate import gate
    from dsv4.judge.measure import measure, write
    from dsv4.run.setup import prepare
    from dsv4.run.variant import write_variant

    ladder, setup = small.config.ladder, prepare(small.config.path, small.results)
    write_variant(setup, ladder["P4"])
    (small.results / "metrics").mkdir(exist_ok=True)
    write(small.results / "metrics/P4.parquet", *measure(small.results, ladder, "P4", setup.tokens))
    rung = gate(small.results, small.config, "P4")
    said = evidence.trailers(small.config, rung, "P4", small.results / "variants/P4")
    commit = verdict(small.results, small.config, small.shas["base"])
    found = evidence.of_verdict(small.results, small.config, commit)
    assert said == found
    assert compare(list(said.items()), found, lambda: NOISE).state == "reproduced"


@pytest.mark.xdist_group("commits")
def test_claims_are_those_that_git_parses(small, tmp_path):
    from dsv4.commits.conftest import Repository

    repo = Repository(tmp_path / "repo")
    message = "Subject\n\nAudit-Verdict: fail is no trailer here\n\nReviewed-by: A\nAudit-Verdict: pass\n  and more\n"
    sha = repo.commit(message.strip())
    assert claims(repo.folder, sha) == [("Audit-Verdict", "pass and more")]
    assert parsed(message)["Audit-Verdict"] == "pass and more"
    sha = repo.commit("Words", "audit-verdict: pass\nAUDIT-Cosine-min : 1")
    assert claims(repo.folder, sha) == [("Audit-Verdict", "pass"), ("Audit-Cosine-Min", "1")]


def test_without_base_and_head_it_says_what_to_give(tmp_path):
    from dsv4.commits.conftest import ROOT
    from dsv4.config import load

    with pytest.raises(ConfigError, match="give base and head"):
        verify.verify(tmp_path, load(ROOT / "config.yaml"))


def test_the_example_verdict_has_everything_that_a_second_run_is_compared_by():
    assert set(evidence.MEASURED) <= set(VERDICT)
