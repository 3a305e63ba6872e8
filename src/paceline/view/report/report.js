for (const button of document.querySelectorAll(".legend button")) {
  button.onclick = () => {
    const run = button.dataset.run, on = button.getAttribute("aria-pressed") === "false";
    document.querySelectorAll(`button[data-run=${run}]`).forEach(b => b.setAttribute("aria-pressed", on));
    document.querySelectorAll(`svg .${run}`).forEach(g => g.classList.toggle("off", !on));
  };
}
