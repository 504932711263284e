from orders.models import Order
from taskrunner import task


@task(name="write-receipt", max_retry=5)
def write_receipt(payload):
    order = Order.objects.get(pk=payload["order"])
    # Says the same however often it runs: a task may run twice.
    order.receipt = f"{order.quantity} x {order.item}"
    order.save(update_fields=["receipt"])
