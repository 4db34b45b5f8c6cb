// The button beside a repair copies the repair. Without this script the button stays hidden, and a click on the repair
// selects it.
document.querySelectorAll(".copy").forEach((box) => {
  const button = box.querySelector("button"), code = box.querySelector("pre");
  button.hidden = false;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {  // a page that was opened from a file may not write to the clipboard
      getSelection().selectAllChildren(code);
      button.textContent = document.execCommand("copy") ? "Copied" : "Selected: press Ctrl+C";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
});
