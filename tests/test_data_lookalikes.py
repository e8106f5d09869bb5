"""Text that people read as numbers or dates is told from labels."""

import pytest

from fedbnr_jax.data.lookalikes import looks_like

NUMBERS = """1,5|-0,25|,5|1,5e-3|−3|1,234|1,234,567.89|1.234.567,89|1 234|1'234.5|1_000
12%|12,5 %|3 ‰|$5|€ 1.200,50|1,200 €|-£3.5|12 EUR|USD 12.50|0x1F|-0xff|1\u00a0234"""
DATES = """2024-03-01|2024-3-1|2024/03/01|2024.03.01|01.03.2024|1/3/2024|12/31/2024
31-12-99|2024-03|2024-03-01 12:30|2024-03-01T12:30:05.25Z|2024-03-01 12:30:05+01:00
1 Mar 2024|01-Mar-24|March 1, 2024|Sept 2024|12:30|9:05:01 pm|1.3.2024 7:15"""
LABELS = """A12|12A|3-4 rooms|3-4|1.2.10|10.20.30.40|red|True|no|x1F|1F3|may|June
2008/09|2024-13-01|12-34-5678|555-1234|1,2,3|12 kg|n/a|-|?|%|$|e5|1:1|25:00|v1,5|may be
110 00|1234 AB|1/2|2024Q1|P-2024-03-01|K 12,5"""


def cells(text: str) -> list[str]:
  return [cell for line in text.splitlines() for cell in line.split("|")]


@pytest.mark.parametrize(
  "texts, kind", [(NUMBERS, "number"), (DATES, "date"), (LABELS, None)]
)
def test_cells_are_taken_for_what_people_take_them_for(texts: str, kind: str | None):
  assert {cell: looks_like(cell) for cell in cells(texts)} == dict.fromkeys(
    cells(texts), kind
  )
