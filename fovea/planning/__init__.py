"""What a run will take, told before it begins: parameters, bytes on disk, memory per device, optimizer updates."""
