import argparse
import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from loong.launcher import split


def test_a_model_of_a_family_of_loong_is_cut_as_its_decoder_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=1,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    parser = argparse.ArgumentParser(prog="loong")
    split.add_parser(parser.add_subparsers())
    args = parser.parse_args(["split", str(tmp_path), "--num-layers", "2", "--check"])
    assert args.run(args) == 0
    *printed, last = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("2 layers, 3 slices. Bytes a token:")
    assert "0 to 1        256        128        128" in printed[2]
    assert "loong's own decoder of LlamaForCausalLM cuts the same." in printed
    report = json.loads(last)
    assert report["same_as_decoder"] is True
    assert report["equal_logits"] is True
    assert [cut["context"] for cut in report["cuts"]] == [128.0, 128.0]
