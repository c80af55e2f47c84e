"""What runs inside of an E2B sandbox: standard library only, without the package around it, as root of its virtual machine."""
