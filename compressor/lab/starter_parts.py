"""The text of starter specs, in parts: what stands in braces is filled in."""

from __future__ import annotations

HEAD = """\
# Starter spec for {model}, written by `compress init`.
#
#   1. Put your data in place: see `data` below.
#   2. compress plan {spec}    checks everything, computes nothing heavy
#   3. compress run {spec}     does it; run it again and it resumes
#
# Paths are relative to this file.
version: 1
name: {name}
seed: 0 # the same spec, inputs and versions give the same bytes
"""

ONNX = """
# The float model. The file knows its inputs:
{inputs}
model:
  onnx: {model}
"""

NOTHING_RUNS = """
# ONNX Runtime has no operator {operator}, so nothing can run the model here. There is
# no `data`, for the passes need none, and neither quality nor latency is measured.
"""

TORCH = """
# The float model: a function that builds the network, and the weights to put into it
# ({tensors:,} tensors, {parameters:,} parameters). Python names are imported, from this folder or
# the one you are in; checkpoints are read as weights only and never run code.
model:
  factory: my_package.model:build # FILL IN: called without arguments, returns a torch.nn.Module
  # config: {{width: 64}} # keyword arguments for the factory
  checkpoint: {model}
  inputs: # FILL IN: what forward takes; a name in place of a size is a dynamic axis
{inputs}
"""

PRETRAINED = """
# The float model: transformers builds the network that config.json describes and maps the weights
# ({tensors:,} tensors, {parameters:,} parameters). Nothing is fetched; code that comes with a model
# never runs.
model:
  factory: transformers.{auto_class}
  checkpoint: {model}
"""

WIDENED = """\
  config: {{dtype: float32}} # the weights are {dtype}, {why}
"""

PART = """\
  part: {part} # without the decoder
"""

SIDE = """\
  part: {part} # one side alone; for the other, write another spec with part: {others}
"""

UNKNOWN_INPUTS = """\
  # inputs: # FILL IN, and below too, if `compress plan` asks for it
  #   input_ids: {shape: [batch, sequence], dtype: int64}
"""

TEXT = """
# Text in UTF-8, cut into samples of so many tokens. `jsonl: FILE` takes objects with a `field`.
data:
  # FILL IN: typical text. Take it from the training data: what tunes a model must not also judge
  # it. Only methods gptq, awq and reconstruct read it.
  calibration:
    text: calibration.txt
    tokenizer: {model}
    length: {length}
    inputs: {{input_ids: input_ids}}
    samples: 128
    batch: 8
  # FILL IN: text on which the float model and every artifact are compared.
  evaluation:
    text: evaluation.txt
    tokenizer: {model}
    length: {length}
    inputs: {{input_ids: input_ids}}
    target: labels # the token that follows each
    batch: 8
metric: perplexity

# Passes run in this order. `compress passes` lists them all, `compress passes NAME` their options.
passes:
{first}  # 4-bit weights, with a scale for each group of {group} in a row.
  - pass: quantize-weights
    preset: int4-g{group}
    method: gptq # rtn and hqq need no data
    # layers: # rules for single layers; the first that matches wins
    #   - {{match: "lm_head", skip: true}}
"""

EXPERTS_FIRST = """\
  # Makes products of stored weights of those that experts compute from stacks.
  - pass: fuse
"""

LINES = """
# Each line is a sample, with the special tokens, padding and masks of the model's own tokenizer.
{more}data:
  # FILL IN: typical text, some hundred lines, that sets the int8 ranges. Take it from the training
  # data: what tunes a model must not also judge it.
  calibration:
{calibration}
    samples: 512
  # FILL IN: text on which the float model and every artifact are compared.
  evaluation:
{evaluation}
    batch: 32

# {why}
metric: {metric}
"""

LINES_OF = """\
    {kind}: {file}
    samples-per: line
    tokenizer: {model}
    length: {length} # tokens at most; longer lines are cut
{fields}    inputs: {{{mapping}}}"""

OF_TEXT = """\
# `text` is a file in UTF-8. `jsonl: FILE` takes objects, with `field` and `text-pair` as texts.
"""

OF_OBJECTS = """\
# Each is an object, whose texts `field` and `text-pair` name.
"""

SECOND_TEXT = "# text-pair: {field} # CHECK: set it if the model reads pairs"

OF_PAIRS = """\
# Each is an object such as {"question": "Who?", "context": "She did."}.
"""

TEXT_INPUTS = """\
  inputs: # the mask tells padding from text
{inputs}
"""

STORAGE = "  - format: safetensors # reload with compressor.load(folder)\n"
WIDENED_STORAGE = """\
  # Safetensors would hold tables in float32 here; those of `compress quantize` keep bfloat16.
"""

CALIBRATION = """\
  # FILL IN: typical samples, some hundred of them, that set the int8 ranges. Take them from the
  # training data: what tunes a model must not also judge it.
  calibration:
    npz: calibration.npz
    inputs:
{mapping}
    # transform: my_package.data:normalize # fn(batch) -> batch, on arrays by name
    samples: {samples}
    batch: {batch}
"""

FEEDS_FOR_RANGES = """\
  # FILL IN: typical samples that set the int8 ranges. Take them from the training data: what tunes
  # a model must not also judge it.
  calibration:
    npz: calibration # a folder
    samples: feeds{state}
    inputs:
{mapping}
    # transform: my_package.data:normalize # fn(feed) -> feed, on arrays by name
"""

DATA = """
# Each file holds arrays with one row a sample. `inputs` maps each input of the model to an array;
# arrays that do not have the shape and dtype that the model takes yet need a `transform`.
# Besides npz there are npy, safetensors, images (a folder) and factory (your own function).{images}
data:
{calibration}  # FILL IN: samples on which the float model and every artifact are compared.
  evaluation:
    npz: evaluation.npz
    inputs:
{mapping}
    # transform: my_package.data:normalize
    {target}
{samples}    batch: {judged}

{metric}"""

FEEDS = """
# {why}.
# So each sample is a whole feed: an npz file in a folder, with everything that the model takes at
# once, in arrays of any rank. A factory (your function) may yield dictionaries instead.{sequence}
data:
{calibration}  # FILL IN: samples on which the float model and every artifact are compared.
  evaluation:
    npz: evaluation
    samples: feeds{state}
    inputs:
{mapping}
    # transform: my_package.data:normalize
    {target}

{metric}"""

SEQUENCE = """
# CHECK `state`: the input takes that output of the step before, and starts with zeros. Each file
# is then a sequence: what changes from step to step has the steps as one more, first axis."""

IMAGES = """
# Input {name} looks like images of {height} x {width}. For a folder of them, write `images: FOLDER`
# instead of npz, `{name}: image` under inputs, and
# {keys}."""

CODE = """\
\"\"\"How arrays are prepared for the model of {spec}; written by `compress init`.\"\"\"

import numpy as np
{levels}

def prepare(batch):
    \"\"\"Return arrays, by the names of inputs, as the model takes them.\"\"\"
    made = dict(batch)
{lines}
    return made
"""

LEVELS = """
MEAN, STD = np.float32({mean}), np.float32({std})  # {why}
"""

FILES_FOR_RANGES = """\
  # Typical samples that set the int8 ranges.{warning}
  calibration:
    {kind}: {place}
{keys}    inputs: {{{mapping}}}
    samples: {samples}
"""

FILES = """
# {words}.
data:
{calibration}  # Samples on which the float model and every artifact are compared.
  evaluation:
    {kind}: {place}
{keys}    inputs: {{{mapping}}}
{target}{samples}{batch}
{metric}"""

BATCH = 32

ALONE = " # no output begins with the axis of samples, so each is judged alone"

LABEL, OF_ANSWERS = "label", " # the array with the right answers"
OF_CLASSES = " # CHECK: if an output has scores of these classes, with metric: accuracy"

ACCURACY = """\
# What is measured. {name: accuracy, expect: 94.6} checks first that the float model reaches it.
metric: accuracy
"""

AGREEMENT = """\
# Without right answers: how often the top answer is the float model's. With a `target`: accuracy,
# top5, or your own package.module:function.
metric: agreement
"""

CHARACTERS = """\
# Without right answers: the characters that differ from those the float model hears.
metric: character-error-rate
"""

MSE = """\
# The mean squared error against the float model's numbers, of which the largest says nothing; with
# a `target` of the output's shape against these.
metric: mse
"""

SUBSET_ACCURACY = """\
# The share of samples whose labels (scores above 0) are the float model's. With a `target` of 0
# and 1 for each label: the right ones.
metric: subset-accuracy
"""

COSINE = """\
# Without a target, outputs are compared with the float model's: cosine, or mse if an output is one
# number a sample. With one: accuracy, top5, perplexity, mse, or your own package.module:function.
# metric: accuracy
"""

PASSES = """
# Passes run in this order. `compress passes` lists them all, `compress passes NAME` their options.
{title}passes:
{steps}
"""

REST = """
# Each artifact is written, opened again, and measured in the runtime that will serve it.
# `compress exporters` lists the formats.
exports:
{storage}  - format: onnx
    target: ort-cpu # or tensorrt

# The run fails (exit code 1) when an artifact misses one of these.
limits:
  size-ratio: {size_ratio} # bytes of the artifact / bytes of the float model: your budget
  # metric-drop: 1.0 # how much worse the metric may be; in points for metrics in %

output: {output}
"""
