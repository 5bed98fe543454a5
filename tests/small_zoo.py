"""A zoo of small architectures with random weights, for what has to hold on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compressor.models.torch.carrier import TorchCarrier
from compressor.types.tensors import Batch, TensorSpec
from samples.cifar.model import resnet20
from tests import zoo_networks as own

VOCABULARY = 64
_LENGTHS = {"batch": 2, "sequence": 6, "source": 5, "time": 7}


@dataclass(frozen=True)
class Architecture:
    """A network and its inputs; ``build`` gives the same weights at every call."""

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[TensorSpec, ...]


class Pixels(nn.Module):
    """A network of ``transformers`` for images; takes and returns a tensor."""

    def __init__(self, network: nn.Module, output: str):
        super().__init__()
        self.network, self.output = network, output

    def forward(self, pixel_values: Tensor) -> Tensor:
        found: Tensor = getattr(self.network(pixel_values=pixel_values), self.output)
        return found


class Tokens(nn.Module):
    """One for text."""

    def __init__(self, network: nn.Module, output: str):
        super().__init__()
        self.network, self.output = network, output

    def forward(self, input_ids: Tensor) -> Tensor:
        found: Tensor = getattr(self.network(input_ids=input_ids), self.output)
        return found


class MaskedTokens(Tokens):
    """One for text that is padded."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]  # another input
        result = self.network(input_ids=input_ids, attention_mask=attention_mask)
        found: Tensor = getattr(result, self.output)
        return found


class TwoTexts(Tokens):
    """One that reads a text and writes another."""

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:  # type: ignore[override]  # another input
        result = self.network(input_ids=input_ids, decoder_input_ids=decoder_input_ids)
        found: Tensor = getattr(result, self.output)
        return found


class Sounds(nn.Module):
    """An encoder of spectrograms."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, input_features: Tensor) -> Tensor:
        found: Tensor = self.network(input_features).last_hidden_state
        return found


def spec(name: str, *shape: int | str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, shape, dtype)


def image(size: int, name: str = "pixel_values") -> tuple[TensorSpec, ...]:
    return (spec(name, "batch", 3, size, size),)


IDS = (spec("input_ids", "batch", "sequence", dtype="int64"),)
OUTPUTS = {"last_hidden_state": ("Model", "Encoder"), "logits": ("For", "LMHead")}


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a network and draw all that it holds: zeros and ones would hide mistakes."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        module = build().eval()
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, 0.0 if "bias" in name else 1.0, 0.2)
            elif "embed" in name and parameter.ndim == 2:
                nn.init.normal_(parameter, 0.0, 1.0)
            else:
                columns = parameter[0].numel()
                nn.init.normal_(parameter, 0.0, columns**-0.5)
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0.0, 0.2)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
    return module.requires_grad_(False)


def library(
    network: str,
    config: str,
    sizes: dict[str, Any],
    wrapper: Callable[[nn.Module, str], nn.Module] = Tokens,
    attention: str = "eager",
) -> nn.Module:
    """Build a network of ``transformers`` from a small configuration."""
    import transformers

    values = getattr(transformers, config)(**sizes)
    if hasattr(values, "use_cache"):
        values.use_cache = False
    values._attn_implementation = attention
    module = getattr(transformers, network)(values)
    headed = any(part in network for part in OUTPUTS["logits"])
    return wrapper(module, "logits" if headed else "last_hidden_state")


TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
GROUPED: dict[str, Any] = {**TEXT, "num_attention_heads": 8, "num_key_value_heads": 4}
PATCHES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
DISTIL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 64,
    "max_position_embeddings": 32,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
}
OPT: dict[str, Any] = {
    **{k: v for k, v in TEXT.items() if k != "intermediate_size"},
    "ffn_dim": 64,
    "word_embed_proj_dim": 32,
}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
SWIN: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
CONVNEXT: dict[str, Any] = {"hidden_sizes": [16, 24, 32], "depths": [1, 1, 2], "num_stages": 3}
RESNET: dict[str, Any] = {
    "embedding_size": 16,
    "hidden_sizes": [32, 48, 64],
    "depths": [1, 2, 1],
    "layer_type": "bottleneck",
}
REGNET: dict[str, Any] = {
    "embedding_size": 16,
    "hidden_sizes": [32, 48],
    "depths": [1, 2],
    "groups_width": 8,
    "layer_type": "y",
}
MOBILE: dict[str, Any] = {"depth_multiplier": 0.5, "image_size": 64, "num_labels": 10}
EFFICIENT: dict[str, Any] = {
    "image_size": 64,
    "width_coefficient": 1.0,
    "depth_coefficient": 1.0,
    "kernel_sizes": [3, 5, 3],
    "in_channels": [32, 16, 24],
    "out_channels": [16, 24, 40],
    "strides": [1, 2, 2],
    "num_block_repeats": [1, 2, 2],
    "expand_ratios": [1, 6, 6],
    "depthwise_padding": [],
    "hidden_dim": 1280,
    "num_labels": 10,
}
SEGFORMER: dict[str, Any] = {
    "num_encoder_blocks": 3,
    "depths": [1, 1, 1],
    "sr_ratios": [4, 2, 1],
    "hidden_sizes": [16, 32, 48],
    "patch_sizes": [7, 3, 3],
    "strides": [4, 2, 2],
    "num_attention_heads": [2, 4, 4],
    "mlp_ratios": [2, 2, 2],
    "decoder_hidden_size": 32,
    "num_labels": 5,
}
WHISPER: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "num_mel_bins": 20,
    "max_source_positions": 16,
    "decoder_layers": 1,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def whisper() -> nn.Module:
    """Return the encoder of Whisper alone."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(**WHISPER)
    config._attn_implementation = "eager"
    return Sounds(WhisperEncoder(config))


PAIR = (spec("left", "batch", "time", 16), spec("right", "batch", "source", 12))
TEXTS = (*IDS, spec("decoder_input_ids", "batch", "time", dtype="int64"))
MASKED = (*IDS, spec("attention_mask", "batch", "sequence", dtype="int64"))
VOLUME = (spec("sound", "batch", 4, 32), spec("volume", "batch", 1, 6, 6, 6))

_BUILDS: tuple[tuple[str, Callable[[], nn.Module], tuple[TensorSpec, ...]], ...] = (
    ("bert", partial(library, "BertModel", "BertConfig", TEXT), IDS),
    (
        "bert-masked",
        partial(library, "BertForSequenceClassification", "BertConfig", TEXT, MaskedTokens, "sdpa"),
        MASKED,
    ),
    ("distilbert", partial(library, "DistilBertModel", "DistilBertConfig", DISTIL), IDS),
    ("roberta", partial(library, "RobertaForMaskedLM", "RobertaConfig", TEXT), IDS),
    ("gpt2", partial(library, "GPT2LMHeadModel", "GPT2Config", GPT2), IDS),
    ("opt", partial(library, "OPTForCausalLM", "OPTConfig", OPT), IDS),
    ("llama", partial(library, "LlamaForCausalLM", "LlamaConfig", GROUPED), IDS),
    (
        "llama-sdpa",
        partial(library, "LlamaForCausalLM", "LlamaConfig", GROUPED, Tokens, "sdpa"),
        IDS,
    ),
    ("qwen2", partial(library, "Qwen2ForCausalLM", "Qwen2Config", GROUPED), IDS),
    ("mistral", partial(library, "MistralForCausalLM", "MistralConfig", GROUPED), IDS),
    ("t5-encoder", partial(library, "T5EncoderModel", "T5Config", T5), IDS),
    ("t5", partial(library, "T5ForConditionalGeneration", "T5Config", T5, TwoTexts), TEXTS),
    ("vit", partial(library, "ViTForImageClassification", "ViTConfig", PATCHES, Pixels), image(32)),
    (
        "deit",
        partial(library, "DeiTForImageClassification", "DeiTConfig", PATCHES, Pixels),
        image(32),
    ),
    (
        "swin",
        partial(library, "SwinForImageClassification", "SwinConfig", SWIN, Pixels),
        image(32),
    ),
    (
        "convnext",
        partial(library, "ConvNextForImageClassification", "ConvNextConfig", CONVNEXT, Pixels),
        image(64),
    ),
    (
        "resnet",
        partial(library, "ResNetForImageClassification", "ResNetConfig", RESNET, Pixels),
        image(64),
    ),
    (
        "regnet",
        partial(library, "RegNetForImageClassification", "RegNetConfig", REGNET, Pixels),
        image(64),
    ),
    (
        "mobilenet-v2",
        partial(library, "MobileNetV2ForImageClassification", "MobileNetV2Config", MOBILE, Pixels),
        image(64),
    ),
    (
        "efficientnet",
        partial(
            library, "EfficientNetForImageClassification", "EfficientNetConfig", EFFICIENT, Pixels
        ),
        image(64),
    ),
    (
        "segformer",
        partial(library, "SegformerForSemanticSegmentation", "SegformerConfig", SEGFORMER, Pixels),
        image(64),
    ),
    (
        "clip-vision",
        partial(library, "CLIPVisionModel", "CLIPVisionConfig", PATCHES, Pixels),
        image(32),
    ),
    ("whisper-encoder", whisper, (spec("input_features", "batch", 20, 32),)),
    ("unet", own.UNet, image(32, "image")),
    ("unet-upsampling", own.UpsamplingUNet, image(32, "image")),
    ("densenet", own.dense_net, image(32, "image")),
    ("inception", own.inception, image(32, "image")),
    ("mobilenet", own.mobile_net, image(32, "image")),
    ("squeeze-excite", own.squeeze_excite, image(16, "image")),
    ("super-resolution", own.SuperResolution, image(16, "image")),
    ("resnet-20", resnet20, image(32, "image")),
    ("shufflenet", own.shuffle_net, image(16, "image")),
    ("resnext", own.res_next, image(16, "image")),
    ("encoder", partial(own.Encoder, False), (spec("features", "batch", "time", 32),)),
    ("encoder-norm-first", partial(own.Encoder, True), (spec("features", "batch", "time", 32),)),
    ("cross-attention", own.CrossAttention, PAIR),
    ("recurrent", own.Recurrent, IDS),
    ("volumes", own.Volumes, VOLUME),
)
ZOO = tuple(Architecture(name, partial(seeded, b), inputs) for name, b, inputs in _BUILDS)
NAMES = tuple(architecture.name for architecture in ZOO)


def architecture(name: str) -> Architecture:
    """Return one by its name."""
    return ZOO[NAMES.index(name)]


@cache
def carrier(name: str) -> TorchCarrier:
    """Return an architecture's carrier; it is lowered once for all tests that ask."""
    chosen = architecture(name)
    return TorchCarrier(chosen.build(), chosen.inputs)


def batch(inputs: tuple[TensorSpec, ...], seed: int = 5) -> Batch:
    """Draw inputs: two samples, each dynamic axis with a length of its own."""
    rng = np.random.default_rng(seed)
    drawn: Batch = {}
    for one in inputs:
        shape = [_LENGTHS[d] if isinstance(d, str) else int(d or 1) for d in one.shape]
        if one.name == "attention_mask":
            mask = np.ones(shape, np.int64)
            mask[0, -2:] = 0
            drawn[one.name] = mask
        elif one.dtype == "int64":
            drawn[one.name] = rng.integers(3, VOCABULARY - 14, shape)
        else:
            drawn[one.name] = rng.standard_normal(shape).astype(one.dtype)
    return drawn
