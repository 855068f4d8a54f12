"""How a model's weights come and what becomes of them, as the engine asks before it reads any: formats, ops, units.

Made once at start from the checkpoint's configuration and `worker.quantize`.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from services.worker.quant.catalog import all_formats
from services.worker.quant.coded import CodedFormat
from services.worker.quant.detect import format_of, read_rules
from services.worker.quant.rules import Rules


class Coding(NamedTuple):
    """`rules`: of the checkpoint's coded matrices; None: it has none. `quantize`: what others are converted to."""

    rules: Rules | None = None
    quantize: str = ""

    @property
    def formats(self) -> list[CodedFormat]:
        """Those that weights will be in, of the coded ones."""
        if self.quantize:
            return [all_formats()[self.quantize]]
        return [format_of(scheme, "") for scheme in (self.rules.schemes if self.rules is not None else ())]

    @property
    def ops(self) -> dict[str, int]:
        """By name, 1 each: Facts.shapes of a model that may call them."""
        return dict.fromkeys((op for form in self.formats for op in form.ops), 1)

    @property
    def unit(self) -> int:
        """How many numbers of an inner width ranks divide together, so that each has whole blocks; 1: as they like."""
        schemes = [] if self.quantize or self.rules is None else self.rules.schemes
        groups = [scheme.weight.group for scheme in schemes if scheme.weight.group]
        return math.lcm(*(size for form in self.formats for size in form.unit), *groups)


def read_coding(config: Mapping[str, object], where: str, quantize: str, has_files: bool = True) -> Coding:
    """config: of the checkpoint. Without files nothing is coded, whatever it says. Raises ConfigError."""
    return Coding(read_rules(config, where) if has_files else None, quantize)
