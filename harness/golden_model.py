"""Whether a golden was made of a checkpoint that is here, so that an oracle may run beside it."""

from harness.config import ModelSource
from harness.engines.assets import checkpoint_folder
from harness.golden_data import Golden


def is_made_of(golden: Golden, model: ModelSource) -> bool:
    """Whether the weights of `model` are those that the golden says it was made of; False where it does not say.

    Hashes the weights only where their hash is not already required to be one. Raises InputError for a folder without.
    """
    made_of = golden.provenance.get("model_sha256")
    if made_of is None or model.sha256 is not None:
        return made_of is not None and model.sha256 == made_of
    from harness.engines.transformers_load import weight_files, weights_sha256

    return weights_sha256(weight_files(checkpoint_folder(model.path))) == made_of
