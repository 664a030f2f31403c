"""Facts about the devices that models run on."""
