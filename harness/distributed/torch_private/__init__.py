"""Every private API of torch that is used, one file each, with the torch versions it was checked on."""
