"""A small shop of one's own."""

from __future__ import annotations

from typing import Any

import pytest

from docs.examples.order_fulfilment.shop import Shop


@pytest.fixture
async def shop(database: Any) -> Shop:
    """A shop with ten units of product 1 and five of product 2, where nothing gets lost."""
    shop = Shop.on(database, caller="a worker")
    await shop.open({1: 10, 2: 5})
    return shop
