// Plays the picture of the front page. Without this script, the picture shows its last step.
document.querySelectorAll(".kvviz-opening").forEach((figure) => {
  if (figure.dataset.ready || !figure.querySelector(".kvviz-play")) return;
  figure.dataset.ready = "1";
  const picture = figure.querySelector("svg"), controls = figure.querySelector(".kvviz-play");
  const [button, slider, said] = ["button", "input", "output"].map((name) => controls.querySelector(name));
  const last = Number(slider.max), words = button.textContent;
  let timer = 0;
  const show = (step) => {
    picture.dataset.step = slider.value = step;
    const sentences = [...picture.querySelectorAll(`.kvviz-only-${step} text`)].map((line) => line.textContent);
    said.textContent = sentences.join(" ");
  };
  const stop = () => { clearInterval(timer); timer = 0; button.textContent = words; };
  const play = () => {
    let step = 0;
    show(step);
    button.textContent = "■ Stop";
    timer = setInterval(() => { show(++step); if (step === last) stop(); }, 1200);
  };
  button.addEventListener("click", () => (timer ? stop() : play()));
  slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
  controls.hidden = false;
});
