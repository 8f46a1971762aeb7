"""Check the checkpoint before anything runs on it, and record what it is.

The hashes of its whole files stand in the record, on which every dump rests: files that have
changed in so little that the name of the run stays (see :func:`dsv4.config.checkpoint_sha256`)
change the record, and what was computed from the old ones is computed again.
"""

from collections import Counter
from collections.abc import Sequence

from dsv4.config import checkpoint_files, checkpoint_sha256, load, model_config
from dsv4.console import main_guard, progress
from dsv4.files import write_json
from dsv4.model.checkpoint import load as load_checkpoint
from dsv4.model.config import ModelConfig
from dsv4.run.setup import parse
from dsv4.stored import file_sha256


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: ``python -m dsv4.run.checkpoint --config C --results R``."""
    options = parse(__doc__ or "", arguments)
    config = load(options.config)
    checkpoint = load_checkpoint(config.checkpoint)
    files = {path.name: path for path in checkpoint_files(config.checkpoint)}
    write_json(
        options.results / "checkpoint.json",
        {
            "folder": str(config.checkpoint),
            "sha256": checkpoint_sha256(config.checkpoint),
            "files": {name: file_sha256(files[name]) for name in progress(list(files), "hash")},
            "config": {name: getattr(checkpoint.config, name) for name in ModelConfig.__annotations__},
            "label": str(model_config(config.checkpoint).get("weights_label", "")),
            "formats": dict(checkpoint.formats),
            "stored_as": Counter(checkpoint.formats.values()),
        },
    )


if __name__ == "__main__":
    main_guard(main)
