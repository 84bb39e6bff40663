"""Capabilities of a step, a folder each. A part knows neither the job nor the trainer nor another
part."""
