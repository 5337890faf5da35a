"""Write a model as a Hugging Face folder in float32, so that peers that cannot read GGUF serve the same weights.

    python bench/peers/demo_folder.py FOLDER [--model NAME]     without --model: the demo model

Values are those our own engine computes with. Two steps of the tokenizer are folded into one, as our frontend does by
itself: the same tokens, faster, and the fastokens inside NVIDIA Dynamo 1.6 refuses the file without it. Only dense
models of the Llama architecture with plain rotary embedding.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from headwater.engines.native.base import NativeModelConfig
from headwater.engines.native.checkpoints import open_checkpoint
from headwater.frontend.preprocess.folding import folded
from headwater.weights import ResolvedModel, resolve


def config_json(config: NativeModelConfig, model: ResolvedModel) -> dict[str, object]:
    if config.architecture != "LlamaForCausalLM" or config.rope.kind != "default":
        raise SystemExit(f"{config.architecture} with {config.rope.kind} rotary embedding is not written here")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": model.eos_token_ids[0],
    }


def tokenizer_json(model: ResolvedModel) -> str:
    text = model.tokenizer_json.decode()
    return folded(text) or text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="as for `headwater serve`")
    args = parser.parse_args()
    model = resolve(args.model)
    checkpoint = open_checkpoint(model)
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    tied = checkpoint.config.tie_word_embeddings
    tensors = {
        name: checkpoint.tensor(name).to(torch.float32).contiguous()
        for name in checkpoint.names()
        if not (tied and name == "lm_head.weight")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_json(checkpoint.config, model), indent=1))
    generation = {"bos_token_id": model.bos_token_id, "eos_token_id": list(model.eos_token_ids)}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer.json").write_text(tokenizer_json(model))
    (folder / "tokenizer_config.json").write_bytes(model.tokenizer_config or b"{}")
    (folder / "chat_template.jinja").write_text(model.chat_template or "")
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
