"""Matrix product whose bits do not depend on batch, order, threads or device."""
