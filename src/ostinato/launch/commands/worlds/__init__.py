"""The commands of `ostinato worlds`."""
