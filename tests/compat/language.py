"""Models of Transformers, adapters of PEFT, data sets of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.compat.case import (
    NUM_SAMPLES,
    Case,
    Listed,
    Rows,
    Watch,
    classes,
    cut_labels,
    floats,
    labels_after_the_first,
    labels_that_count,
)
from tests.compat.recipes import DROPOUT, WHOLE

PIECES = "the loss relates the samples of each device's piece"
GROUP = "Transformers"
VOCABULARY, LENGTH = 32, 8
SMALL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FLOAT32_INSIDE = 1e-3
"""Tolerance for models that compute parts in float32 for any input."""


def causal_texts() -> Rows:
    tokens = 3 + classes(VOCABULARY - 3, LENGTH)
    return Rows(input_ids=tokens, labels=cut_labels(tokens))


def sentences() -> Rows:
    return Rows(
        input_ids=3 + classes(VOCABULARY - 3, LENGTH),
        attention_mask=torch.ones(NUM_SAMPLES, LENGTH, dtype=torch.long),
        labels=classes(3),
    )


def masked_sentences() -> Rows:
    tokens = 3 + classes(VOCABULARY - 3, LENGTH)
    return Rows(input_ids=tokens, labels=cut_labels(tokens))


def pictures() -> Rows:
    return Rows(pixel_values=floats(3, 16, 16), labels=classes(3))


def captions() -> Rows:
    return Rows(
        input_ids=3 + classes(VOCABULARY - 3, LENGTH),
        pixel_values=floats(3, 16, 16),
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **SMALL,
        )
    )


DECODER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, **DECODER, **SMALL))


def qwen() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, **DECODER, **SMALL)
    )


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(num_key_value_heads=1, num_local_experts=4, **DECODER, **SMALL)
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            **SMALL,
        )
    )
    model.generation_config.max_new_tokens = 4
    return model


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            dropout=0.0,
            attention_dropout=0.0,
            max_position_embeddings=32,
            decoder_start_token_id=2,
            forced_eos_token_id=2,
            **SMALL,
        )
    )


ENCODER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(**options: Any) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(num_labels=3, max_position_embeddings=16, **ENCODER, **SMALL, **options)
    return BertForSequenceClassification(config)


def masked_bert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    return DistilBertForMaskedLM(
        DistilBertConfig(
            dim=16,
            hidden_dim=32,
            n_layers=2,
            n_heads=2,
            dropout=0.0,
            attention_dropout=0.0,
            max_position_embeddings=16,
            **SMALL,
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(image_size=16, patch_size=8, num_labels=3, **ENCODER, **NO_DROPOUT)
    )


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {**ENCODER, **SMALL, "max_position_embeddings": 16}
    vision = {**ENCODER, "image_size": 16, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            num_mel_bins=8,
            max_source_positions=8,
            max_target_positions=16,
            dropout=0.0,
            decoder_start_token_id=1,
            **SMALL,
        )
    )


def spoken() -> Rows:
    tokens = 3 + classes(VOCABULARY - 3, LENGTH)
    return Rows(input_features=floats(8, 16), labels=cut_labels(tokens))


def adapted(base: nn.Module, **options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=8, init_lora_weights="gaussian", **options)
    return get_peft_model(base, config)


def hub_data() -> Any:
    """An in-memory data set of Hugging Face."""
    from datasets import Dataset

    rows = causal_texts()
    columns = {name: [rows[i][name].tolist() for i in range(NUM_SAMPLES)] for name in rows[0]}
    return Dataset.from_dict(columns).with_format("torch")


def unequal_texts() -> Listed:
    """Rows of tokens of unequal length, for a padding collator."""
    return Listed([{"input_ids": list(range(3, 7 + i % 5))} for i in range(NUM_SAMPLES)])


def tokenizer() -> Any:
    """An in-memory tokenizer of numbers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, **{str(i): i for i in range(1, VOCABULARY)}}
    rules = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=rules, pad_token="<pad>")


def padding() -> Any:
    """The collator of Transformers that pads each batch to its longest row."""
    from transformers import DataCollatorForLanguageModeling

    return DataCollatorForLanguageModeling(tokenizer(), mlm=False)


class Lazy:
    """A collate function created at its first call, so importing this file needs no package.

    Args:
        make: Creates it.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self, samples: list[Any]) -> Any:
        return self._made(samples)

    @cached_property
    def _made(self) -> Any:
        return self._make()


def call(model: nn.Module, batch: Any) -> Any:
    """The loss returned by a model of Transformers."""
    return model(**batch)


def contrast(model: nn.Module, batch: Any) -> Any:
    """The contrastive loss of CLIP, which relates all samples of the batch."""
    return model(**batch, return_loss=True)


class Features(nn.Module):
    """CLIP without the part that relates samples to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.clip = clip()

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Any:
        return (
            self.clip.get_text_features(input_ids).pooler_output,
            self.clip.get_image_features(pixel_values).pooler_output,
        )


def contrast_in_the_loop(model: nn.Module, batch: Any) -> Tensor:
    """The contrastive loss, computed from the features of the batch."""
    text, image = (F.normalize(z, dim=-1) for z in model(**batch))
    logits = 10 * text @ image.T
    targets = torch.arange(len(logits))
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def generate(bare: nn.Module) -> Watch:
    """Texts generated from the model as it is after each step."""

    def watch(model: Any) -> None:
        model.eval()
        with torch.no_grad():
            assert model.generate(torch.tensor([[3, 4, 5]])).shape[1] <= 5
        model.train()

    return watch


def of(name: str, make: Any, data: Any = causal_texts, **rest: Any) -> Case:
    return Case(
        name=name,
        group=GROUP,
        make=make,
        data=data,
        **{"loss": call, "weight": labels_after_the_first, "tolerance": FLOAT32_INSIDE, **rest},
    )


def checkpointed(model: Any) -> nn.Module:
    model.gradient_checkpointing_enable()
    return model


PER_SAMPLE: Any = {"weight": None}
PER_TOKEN: Any = {"weight": labels_that_count}
CASES = [
    of("GPT-2", gpt2),
    of("Llama", llama),
    of("Qwen3, tied embedding", qwen),
    of("Mixtral (experts)", mixtral, double=False),
    of(
        "T5 that generates texts meanwhile", t5, **PER_TOKEN, watch=generate, absent={"FSDP": WHOLE}
    ),
    of("BART", bart, **PER_TOKEN),
    of("Whisper", whisper, spoken, **PER_TOKEN),
    of("BERT, classification, with dropout", bert, sentences, **PER_SAMPLE, differs=DROPOUT),
    of("BERT, classification", lambda: bert(**NO_DROPOUT), sentences, **PER_SAMPLE),
    of("DistilBERT, masked tokens", masked_bert, masked_sentences, **PER_TOKEN),
    of("ViT", vit, pictures, **PER_SAMPLE),
    of(
        "CLIP",
        clip,
        captions,
        loss=contrast,
        **PER_SAMPLE,
        differs=PIECES,
        refused={"setup": "each relates the samples of its piece to each other"},
    ),
    of(
        "CLIP, contrast in the loop",
        Features,
        captions,
        loss=contrast_in_the_loop,
        **PER_SAMPLE,
        unlike=dict.fromkeys(("SYNC", "FSDP", "coordinator"), PIECES),
    ),
    of("GPT-2 with gradient checkpointing", lambda: checkpointed(gpt2())),
    of("GPT-2 on a data set of `datasets`", gpt2, hub_data),
    of("GPT-2 with a padding collator", gpt2, unequal_texts, loader={"collate_fn": Lazy(padding)}),
    of("LoRA (PEFT) on GPT-2", lambda: adapted(gpt2(), target_modules=["c_attn"])),
    of(
        "LoRA (PEFT) on BERT",
        lambda: adapted(bert(**NO_DROPOUT), target_modules=["query", "value"], task_type="SEQ_CLS"),
        sentences,
        **PER_SAMPLE,
    ),
]
