"The transformers path on a tiny model that the test builds itself; skipped where PyTorch is not installed."
import json
import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'granite[hf]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'granite[hf]'")

from granite.toolcall.generate import DECODINGS, Condition, Decoding, GenerateError, TransformersModel, load_replies, run_conditions  # noqa: E402
from granite.toolcall.prompts import load_prompts, raw_prompt, TOOLS  # noqa: E402
from granite.toolcall.scores import score_replies  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    "A two-layer Llama with a word tokenizer, saved as a folder"
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    folder = tmp_path_factory.mktemp("tiny")
    words = Tokenizer(models.BPE(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders
    words.decoder = decoders.ByteLevel()
    words.train_from_iterator([raw_prompt(p, TOOLS) for p in load_prompts().prompt], trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"]))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                      max_position_embeddings=2048, bos_token_id=1, eos_token_id=2)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_greedy_repeats_and_seeds_matter(checkpoint):
    text = raw_prompt(load_prompts().prompt[0], TOOLS)
    with TransformersModel(str(checkpoint), threads=1) as model:
        greedy = [model.complete(text, Decoding(max_tokens=12), seed) for seed in (1, 2)]
        sampled = [model.complete(text, Decoding(1.5, 0.9, 12), seed).text for seed in (1, 1, 2)]
    assert greedy[0].text == greedy[1].text
    assert sampled[0] == sampled[1] != sampled[2]
    assert greedy[0].completion_tokens <= 12 and greedy[0].finish in ("stop", "length")
    assert greedy[0].prompt_tokens > 100 and greedy[0].prefill_ms > 0 and greedy[0].wall_s > 0


def test_weights_are_fp32_and_identified(checkpoint):
    with TransformersModel(str(checkpoint), threads=1) as model:
        assert {p.dtype for p in model.model.parameters()} == {torch.float32}
        facts = model.facts
    assert facts["quantization"] == "FP32" and len(facts["sha256"]) == 16 and "torch" in facts["server"]
    assert str(checkpoint) not in json.dumps(facts)


def test_a_run_is_recorded_scored_and_resumed(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setitem(DECODINGS, "greedy", Decoding(max_tokens=8))
    grid = [Condition(), Condition("chat")]
    with TransformersModel(str(checkpoint), threads=1) as model:
        assert run_conditions(model, grid, tmp_path / "tiny", limit=3) == 6
        assert run_conditions(model, grid, tmp_path / "tiny", limit=3) == 0
    replies = load_replies(tmp_path)
    assert len(replies) == 6 and set(replies.template) == {"raw", "chat"}
    assert not score_replies(replies, load_prompts()).success.any()


def test_what_it_cannot_do_is_said_in_one_line(checkpoint):
    with TransformersModel(str(checkpoint), threads=1) as model:
        with pytest.raises(GenerateError, match="embedded engine"): model.complete("x", Decoding(max_tokens=2), 1, schema={})
        model.tokenizer.chat_template = None
        with pytest.raises(GenerateError, match="template raw"): model.chat([])
    with pytest.raises(GenerateError, match="could not be loaded") as e: TransformersModel(str(checkpoint.parent / "nowhere")).__enter__()
    assert "\n" not in str(e.value)
