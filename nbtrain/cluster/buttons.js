// Interrupt and Restart rank. The kernel runs a cell, so that what is asked goes over its control channel.

function ask(model, verb, rank) {
  const kernel = model.widget_manager.kernel;
  const header = {
    msg_id: crypto.randomUUID ? crypto.randomUUID() : String(Math.random()).slice(2),
    msg_type: "nbtrain_request",
    session: kernel.clientId,
    username: kernel.username,
    date: new Date().toISOString(),
    version: "5.3",
  };
  const content = { verb, rank };
  kernel.sendControlMessage(
    { header, content, parent_header: {}, metadata: {}, buffers: [], channel: "control" }, false, true
  );
}

function button(text, title, press) {
  const element = document.createElement("button");
  element.textContent = text;
  element.title = title;
  element.className = "nbtrain-button";
  element.addEventListener("click", () => {
    element.disabled = true;
    press();
  });
  return element;
}

function render({ model, el }) {
  const draw = () => {
    const parts = [button("Interrupt", "All ranks are back at the prompt; they keep their state", () => ask(model, "interrupt", -1))];
    for (const rank of model.get("ranks")) {
      parts.push(button(`Restart rank ${rank}`, "Interrupt, then replace this rank; the others keep their state",
        () => ask(model, "restart", rank)));
    }
    el.replaceChildren(...parts);
  };
  model.on("change:ranks", draw);
  draw();
}

export default { render };
