// The example asks the server whose page this is.

document.getElementById("address").textContent = location.origin;
