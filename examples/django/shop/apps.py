from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules


class ShopConfig(AppConfig):
    name = "shop"

    def ready(self) -> None:
        """Make the runner and register the tasks, in every process that sets Django up."""
        autodiscover_modules("runner", "tasks")  # of these names, in every installed app
