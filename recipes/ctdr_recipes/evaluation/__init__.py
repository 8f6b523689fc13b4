"""The evaluation of CTDR: nine published networks, five ways to train each, predicted and measured."""
