"""One module or small package for each training framework; nothing else imports them."""
