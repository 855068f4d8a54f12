"""How a checkpoint says that a matrix is coded, in words that no tool owns. Values only.

Readers of configurations (detect.py, detect_groups.py) make schemes; the formats in this folder say which they take.
"""

from dataclasses import dataclass

TENSOR, ROW, BLOCK, GROUP = "tensor", "row", "block", "group"


@dataclass(frozen=True)
class Numbers:
    """`kind`: fp8, fp4, int8 or int4. `per`: what shares a scale; a row of activations is a token.

    `group`: columns of a group, or rows and columns of a block. `dynamic`: scaled while serving, of activations only.
    `powers`: scales are powers of two, stored as their exponents (e8m0).
    """

    kind: str
    per: str
    group: int = 0
    symmetric: bool = True
    dynamic: bool = True
    powers: bool = False

    def __str__(self) -> str:
        sized = f" of {self.group}" if self.group else ""
        rest = ("" if self.symmetric else ", asymmetric") + (", powers of two" if self.powers else "")
        return f"{self.kind} per {self.per}{sized}{rest}{'' if self.dynamic else ', static'}"


@dataclass(frozen=True)
class Scheme:
    """`names`: whose names of tensors and packing: "compressed-tensors", "quark", "fp8", "fbgemm", "awq", "gptq", ...;
    of torchao "torchao" or, for its packed numbers of four bits, "torchao-packed".

    `activation` None: activations stay as they are. `ordered`: columns may be in groups out of order (act-order);
    `zeros_less_one`: zero points are stored less one.
    """

    names: str
    weight: Numbers
    activation: Numbers | None = None
    ordered: bool = False
    zeros_less_one: bool = False

    @property
    def suffixes(self) -> tuple[str, str, str]:
        """Behind a module's name: of numbers that are not packed, of their scales and of their zero points."""
        if self.names.startswith("torchao"):
            return "_weight_qdata", "_weight_scale", "_weight_zero_point"
        return "weight", "weight_scale", "weight_zero_point"

    def __str__(self) -> str:
        return f"weights {self.weight}, activations {self.activation or 'as they are'} ({self.names})"
