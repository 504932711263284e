import json

from django.test import TestCase

from orders.models import Order
from taskrunner.testing import eager


class OrderTests(TestCase):
    def order(self, quantity: int):
        """Post an order; what waits for the commit runs, and so do the tasks."""
        with eager(), self.captureOnCommitCallbacks(execute=True):
            body = json.dumps({"item": "tea", "quantity": quantity})
            return self.client.post("/orders", body, content_type="application/json")

    def test_an_order_gets_its_receipt(self):
        assert self.order(2).status_code == 202
        assert Order.objects.get().receipt == "2 x tea"

    def test_what_is_out_of_stock_is_not_kept(self):
        assert self.order(11).status_code == 409
        assert not Order.objects.exists()
