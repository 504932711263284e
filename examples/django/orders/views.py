import json

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST

from orders.models import Order
from orders.tasks import write_receipt

IN_STOCK = 10


class OutOfStockError(Exception):
    pass


@csrf_exempt  # so that the example can be called with curl
@require_POST
def create(request: HttpRequest) -> JsonResponse:
    wanted = json.loads(request.body)
    try:
        with transaction.atomic():
            order = Order.objects.create(item=wanted["item"], quantity=wanted["quantity"])
            # Not before the commit: a worker is quick, and would find no order. Never after a
            # rollback: there is none.
            transaction.on_commit(lambda: write_receipt.delay({"order": order.pk}))
            if order.quantity > IN_STOCK:
                raise OutOfStockError
    except OutOfStockError:
        return JsonResponse({"error": "out of stock"}, status=409)
    return JsonResponse({"id": order.pk}, status=202)


@require_GET
def show(request: HttpRequest, pk: int) -> JsonResponse:
    order = get_object_or_404(Order, pk=pk)
    return JsonResponse({"id": order.pk, "item": order.item, "receipt": order.receipt})
