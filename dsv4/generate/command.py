"""``python -m dsv4 generate [--rung ID] [--prompt TEXT | --chat TEXT ...]``: text on stdout, its account on stderr.

Without a text the configuration's prompts that are continued (`use: text` or both) are one batch.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from dsv4.config import Config, ConfigError
from dsv4.generate.accounting import Account, account, by_kind
from dsv4.generate.batch import Continuation, Request, generate
from dsv4.generate.chat import Chat
from dsv4.generate.sampling import Sampling
from dsv4.generate.stops import Kind, Stops, kind_of, stops_of
from dsv4.ladder import LadderError
from dsv4.model import numerics
from dsv4.model.transformer import Transformer
from dsv4.prompts import Prompt, PromptTokenizer
from dsv4.run.setup import Setup, prepare

INTERRUPTED = 130  # exit status after Ctrl-C, as a shell has it


def run(config: Config, arguments: argparse.Namespace) -> int:
    """Generate and print; exit status 130 if the user stops it.

    Raises
    ------
    ConfigError
        An option, a rung or the checkpoint is wrong; or a text is longer than the model's positions.
    """
    if arguments.prompt is not None and arguments.chat is not None:
        raise ConfigError("--prompt and --chat: give one of them; --chat's first TEXT may hold the prompt")
    try:
        job = _Job.of(config, arguments)
        if arguments.chat is not None:
            job.chat(arguments.chat)
        elif arguments.prompt is not None:
            job.plain(Prompt(id="prompt", kind="plain", text=arguments.prompt))
        else:
            job.batch()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except (LadderError, ValueError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error
    return 0


@dataclass(frozen=True)
class _Job:
    """What every way of asking needs."""

    setup: Setup
    model: Transformer
    tokenizer: PromptTokenizer
    sampling: Sampling
    budget: int
    strings: tuple[str, ...]
    chunk: int

    @classmethod
    def of(cls, config: Config, arguments: argparse.Namespace) -> "_Job":
        """Load the checkpoint, and say what computes."""
        seed = config.seed if arguments.seed is None else arguments.seed
        sampling = Sampling(temperature=arguments.temperature, top_p=arguments.top_p, seed=seed)
        if arguments.tokens < 1 or arguments.chunk < 1:
            raise ConfigError(f"--tokens {arguments.tokens} --chunk {arguments.chunk}: expected 1 or more")
        plan = config.ladder[arguments.rung].plan if arguments.rung else None
        setup = prepare(config.path, Path())
        if plan is None:
            model, label = setup.model(numerics.trained(setup.checkpoint.config)), "emulated on cpu"
        else:
            model, kernels = setup.variant_model(plan), setup.backend.kind == "kernel"
            label = f"kernels on {setup.backend.name}" if kernels else "emulated on cpu"
        print(f"{arguments.rung or 'the reference, trained'}: {label}", file=sys.stderr)
        tokenizer = PromptTokenizer(config.checkpoint)
        return cls(
            setup, model, tokenizer, sampling, arguments.tokens, tuple(arguments.stop), arguments.chunk
        )

    def stops(self, kind: Kind) -> Stops:
        """Stop ids of a kind of prompt."""
        return stops_of(self.tokenizer, self.setup.config.checkpoint, kind)

    def request(self, prompt: Prompt) -> Request:
        """All of a prompt, read cold."""
        return Request(
            tokens=self.tokenizer.encode(prompt),
            budget=self.budget,
            stop_ids=self.stops(kind_of(prompt)).every,
            stop_strings=self.strings,
            sampling=self.sampling,
        )

    def plain(self, prompt: Prompt) -> None:
        """Continue one text, streamed."""
        start = time.perf_counter()
        (made,) = generate(
            self.model, self.tokenizer, [self.request(prompt)], chunk=self.chunk, heard=_say_next, drafts=()
        )
        self._ended(made, kind_of(prompt), time.perf_counter() - start)

    def chat(self, texts: Sequence[str]) -> None:
        """Answer one turn after another, streamed."""
        talk = Chat(
            self.model,
            self.tokenizer,
            self.stops("chat").every,
            self.strings,
            self.sampling,
            self.chunk,
        )
        for text in texts:
            _say(f"user: {text}\nassistant: ")
            kind: Kind = "second_turn" if talk.turns else "chat"
            start = time.perf_counter()
            made = talk.ask(text, self.budget, _say_next)
            self._ended(made, kind, time.perf_counter() - start, talk.warm)

    def batch(self) -> None:
        """Continue the prompts of the configuration together, and print each once all are done."""
        prompts = [self.setup.prompts[name] for name in self.setup.texts]
        start = time.perf_counter()
        requests = [self.request(prompt) for prompt in prompts]
        with Console(stderr=True).status(f"{len(prompts)} prompts as one batch"):  # shown on a terminal alone
            made = generate(self.model, self.tokenizer, requests, chunk=self.chunk, drafts=())
        seconds = time.perf_counter() - start
        accounts = []
        for prompt, one in zip(prompts, made, strict=True):
            kind = kind_of(prompt)
            _say(f"== {prompt.id}\n{one.text}\n")
            accounts.append(account(one.tokens, one.reason, kind, self.stops(kind)))
            how = f"{len(one.tokens)} tokens, {self._how(one, accounts[-1])}"
            print(f"{prompt.id} [{kind}: {how}]", file=sys.stderr)
        for kind, found in by_kind(accounts).items():
            ends = [f"{count} ended by {self.tokenizer.name_of(stop)}" for stop, count in found.stops.items()]
            ends += [f"{count} by {reason}" for reason, count in found.not_stopped.items()]
            ends += [f"{found.ran_past} RAN PAST A STOP ID"] if found.ran_past else []
            print(f"{kind}, {found.texts} in all: {', '.join(ends)}", file=sys.stderr)
        print(_rate(sum(len(one.tokens) for one in made), seconds), file=sys.stderr)

    def _ended(self, made: Continuation, kind: Kind, seconds: float, warm: int = 0) -> None:
        _say("\n")
        said = self._how(made, account(made.tokens, made.reason, kind, self.stops(kind)))
        read = f"; {warm} tokens were in the cache" if warm else ""
        print(f"[{kind}: {said}{read}; {_rate(len(made.tokens), seconds)}]", file=sys.stderr)

    def _how(self, made: Continuation, found: Account) -> str:
        """How a text ended, in words."""
        said = {
            "stop_id": f"ended by {self.tokenizer.name_of(found.stop) if found.stop is not None else ''}",
            "stop_string": f"ended by {made.stop!r}",
            "budget": "cut off at the budget",
            "positions": "cut off at the model's last position",
            "not_finite": "logits are not finite",
        }[made.reason]
        own = "" if made.reason != "stop_id" or found.own_stop else ", not this kind's own turn end"
        past = "" if found.ran_past is None else f"; RAN PAST the stop id at token {found.ran_past}"
        loop = found.loop
        repeats = f"; from token {loop.onset} on a loop of {loop.period} tokens" if loop else ""
        return f"{said}{own}{past}{repeats}"


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens in {seconds:.1f} s, prefill included"


def _say_next(_: int, text: str) -> None:
    _say(text)


def _say(text: str) -> None:
    """Write at once; a character that the terminal's encoding lacks is a question mark, no error."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
