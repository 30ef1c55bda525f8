import enum


class synDeviceType(enum.Enum):
    synDeviceGaudi = 0
    synDeviceGaudi2 = 1
    synDeviceGaudi3 = 2
    standIn = 99


def _get_device_type():
    return synDeviceType.standIn


def _data_ptr(tensor):
    return tensor.data_ptr()
