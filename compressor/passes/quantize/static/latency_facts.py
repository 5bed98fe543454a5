"""How fast a runtime's kernels are on kinds of CPUs: measured facts as data.

The rates are of one thread. Nothing is timed when a plan is made or a model runs, so that equal
inputs give equal artifacts on every machine; a choice needs only the relation between two times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kernel = Literal[
    "dense",
    "depthwise",
    "plain",
    "plain-depthwise",
    "product",
    "integer-dense",
    "integer-copied",
    "integer-depthwise",
    "integer-depthwise-rest",
    "integer-product",
]
"""Kernels that multiply with a weight.

``dense`` and ``depthwise`` are float convolutions of images in blocks of channels, ``plain`` and
``plain-depthwise`` those of sequences, volumes and other numbers of channels, which have no blocks.
``integer-dense`` has four channels, or a multiple, or windows of 1 x 1; ``integer-copied`` has
others, whose windows must be copied first. The channels of ``integer-depthwise`` fill all lanes,
those of ``integer-depthwise-rest`` do not.
"""


@dataclass(frozen=True)
class Rates:
    """Nanoseconds of a kernel that multiplies with a weight.

    Attributes:
        call: for each run of it.
        mac: for each multiply-accumulate.
        read: for each element of a window, whatever the number of output channels.
        tap: for each place of a window, whatever the number of channels.
        row: for each row of a window, whatever its length and the number of channels.
        output: for each element that it writes.
        entry: for each element of what it reads.
        weight: for each weight.
        group: for each group of channels.
        window: for each window of a group, where there are groups and windows of several places.
        line: for each row of outputs, and each row of the window for it.
    """

    call: float
    mac: float
    read: float = 0.0
    tap: float = 0.0
    row: float = 0.0
    output: float = 0.0
    entry: float = 0.0
    weight: float = 0.0
    group: float = 0.0
    window: float = 0.0
    line: float = 0.0


@dataclass(frozen=True)
class Latency:
    """The facts of one runtime on one kind of CPU.

    Attributes:
        cpu: the kind, as options name it.
        title: the same in a sentence.
        block: channels that a float convolution computes at a time.
        fewest: output channels that take it as long as one.
        columns: output channels that an integer product computes at a time.
        lanes: channels that an integer depthwise convolution computes at a time.
        rates: of the kernels that multiply with a weight.
        quantize: of floats to codes, for each element.
        dequantize: of codes to floats, for each element.
        turn: of codes, to have their channels last, as integer convolutions want them, or first,
            for each element.
        block_layout: of floats, into blocks of channels, as float convolutions want them, or back,
            for each element.
        simple: an operator of floats on elements, for each element.
        function: the same for exponentials and the like.
        fused: the same where the float convolution before it computes it along.
        bounded: a float layer keeps its outputs within bounds, for each element.
        added: integers are added or concatenated, for each element.
        multiplied: integers are multiplied, for each element.
        spread: the same with one integer for each channel, for each pixel besides.
        joined: channels of integers are concatenated, for each pixel of each input besides.
        looked_up: an integer function of one element.
        pooled: integers are averaged over all pixels, for each element that is read.
        float_pooled: floats are, or over a window.
        slow_average: integers are averaged over a window, for each element that is written.
        slow_pool: the greatest code of a window, channels first, for each element that is written.
        resized: an image that is in no blocks is resized, for each element that is written besides.
        moved: elements are moved, for each byte.
        call: of an operator, for each run of it.
    """

    cpu: str
    title: str
    block: int
    fewest: int
    columns: int
    lanes: int
    rates: Mapping[Kernel, Rates]
    quantize: float
    dequantize: float
    turn: float
    block_layout: float
    simple: float
    function: float
    fused: float
    bounded: float
    added: float
    multiplied: float
    spread: float
    joined: float
    looked_up: float
    pooled: float
    float_pooled: float
    slow_average: float
    slow_pool: float
    resized: float
    moved: float
    call: float


# ONNX Runtime 1.31, CPU provider, one thread of a Zen 5 at 2.6 GHz with AVX-512 VNNI: the least of
# 50 runs of single kernels in ONNX Runtime's profile, fitted by hand to within a fifth for 60
# shapes. Relations of these times on other CPUs with VNNI are alike. What was first told apart on
# the CPU below has that one's rates, in the relation of what is most like it.
VNNI = Latency(
    cpu="vnni",
    title="with VNNI",
    block=16,
    fewest=16,
    columns=16,
    lanes=16,
    rates={
        "dense": Rates(call=1500, mac=0.0072, read=0.055, output=0.03, weight=0.05),
        "depthwise": Rates(call=1500, mac=0.0125, output=0.02, entry=0.02),
        "plain": Rates(call=1500, mac=0.0085, read=0.08, output=0.12, weight=0.17, group=60),
        "plain-depthwise": Rates(call=1500, mac=0.112, group=60),
        "product": Rates(call=1500, mac=0.0078, weight=0.07, output=0.05),
        "integer-dense": Rates(call=2500, mac=0.0019, tap=0.8, output=0.05, weight=0.012),
        "integer-copied": Rates(call=2500, mac=0.0019, row=5.6, output=0.05, weight=0.012),
        "integer-depthwise": Rates(call=2500, mac=0.0145, tap=0.8, output=0.02),
        "integer-depthwise-rest": Rates(call=2500, mac=0.055, tap=0.8, output=0.08),
        "integer-product": Rates(call=2500, mac=0.0019, weight=0.045, output=0.10),
    },
    quantize=0.06,
    dequantize=0.09,
    turn=0.06,
    block_layout=0.14,
    simple=0.11,
    function=0.25,
    fused=0.11,
    bounded=0.1,
    added=0.10,
    multiplied=0.19,
    spread=9.0,
    joined=3.0,
    looked_up=0.25,
    pooled=0.04,
    float_pooled=0.11,
    slow_average=5.0,
    slow_pool=18.0,
    resized=0.4,
    moved=0.03,
    call=1000,
)

# ONNX Runtime 1.31, CPU provider, one thread of a Zen 3 with AVX2 and without VNNI: the least of 60
# runs of single kernels in ONNX Runtime's profile, less what the profile itself takes, and calls
# from chains of up to 60 kernels of hardly any work. Rates of products are those of least relative
# error, none below zero; tests/benchmarks/bench_kernels.py measures the kernels and prints how well
# they fit. Other rates were set by hand from single profiles.
AVX2 = Latency(
    cpu="avx2",
    title="with AVX2 and without VNNI",
    block=8,
    fewest=16,
    columns=16,
    lanes=16,
    rates={
        "dense": Rates(call=700, mac=0.0195, read=0.07, output=0.075, weight=0.075),
        "depthwise": Rates(call=700, mac=0.0344, entry=0.026, line=0.76),
        "plain": Rates(call=900, mac=0.0203, read=0.28, output=0.13, weight=0.245, group=1500),
        "plain-depthwise": Rates(call=900, mac=0.21, output=0.05),
        "product": Rates(call=500, mac=0.0199, weight=0.062, output=0.14),
        "integer-dense": Rates(
            call=1050, mac=0.0101, tap=1.54, output=0.19, weight=0.03, window=29.0
        ),
        "integer-copied": Rates(
            call=1050, mac=0.0101, tap=0.42, row=7.7, output=0.2, read=0.0155, weight=0.03
        ),
        "integer-depthwise": Rates(call=1050, mac=0.0392, tap=0.73, output=0.227),
        "integer-depthwise-rest": Rates(call=1050, mac=0.0533, tap=1.36, output=0.41),
        "integer-product": Rates(call=1300, mac=0.0099, weight=0.019, output=0.35, entry=0.04),
    },
    quantize=0.30,
    dequantize=0.15,
    turn=0.09,
    block_layout=0.19,
    simple=0.17,
    function=0.55,
    fused=0.25,
    bounded=0.16,
    added=0.18,
    multiplied=0.28,
    spread=13.0,
    joined=4.3,
    looked_up=0.34,
    pooled=0.07,
    float_pooled=0.14,
    slow_average=6.5,
    slow_pool=18.0,
    resized=0.55,
    moved=0.05,
    call=600,
)

ORT_CPU_LATENCIES = (VNNI, AVX2)
"""Of ONNX Runtime's CPU provider, on kinds of x86 CPUs."""
