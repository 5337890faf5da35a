"""Write the demo model as a Hugging Face folder, so that peers that cannot read GGUF serve the same weights.

Usage: python bench/peers/demo_folder.py FOLDER [--dtype float32|bfloat16]
Needs transformers, torch and gguf. The tokenizer and template are those of the GGUF file.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headwater.weights import resolve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    gguf = resolve(None).weight_files[0]
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.to(getattr(torch, args.dtype)).save_pretrained(args.folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(args.folder)
    print(f"wrote {args.folder}")


if __name__ == "__main__":
    main()
