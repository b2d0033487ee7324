"""Every private API of torch that the harness uses, one file each, with the torch versions it was checked on."""
