"""Pages of a demand, as the decode worker reserves and the router books them."""

from __future__ import annotations

import pytest

from serving_core.page_demand import PageDemand


@pytest.mark.parametrize(
    ("demand", "num_pages", "num_booked_pages"),
    [
        (PageDemand(num_tokens=16, max_num_tokens=16), 1, 1),
        (PageDemand(num_tokens=17, max_num_tokens=160), 2, 3),
        (PageDemand(num_tokens=17, max_num_tokens=160, num_evictions=1), 4, 5),
        (PageDemand(num_tokens=17, max_num_tokens=160, num_evictions=2), 6, 7),
        (PageDemand(num_tokens=17, max_num_tokens=160, num_evictions=2**32 - 1), 10, 10),
        (PageDemand(num_tokens=160, max_num_tokens=160), 10, 10),
    ],
)
def test_pages_for_a_demand(demand: PageDemand, num_pages: int, num_booked_pages: int) -> None:
    assert (demand.num_pages(16), demand.num_booked_pages(16)) == (num_pages, num_booked_pages)
